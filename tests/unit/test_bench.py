"""The pure parts of `bench`: what is asked, what the numbers come to, what they cannot say, how they are shown."""

from __future__ import annotations

import io
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from rich.console import Console

from prefixproxy.bench.measure import Arm, Measured, Report, Request, Run, Spent, Target, doubts
from prefixproxy.bench.plot import as_svg
from prefixproxy.bench.prompts import (
    Scenario,
    Sizes,
    continued,
    one_by_one,
    reducer,
    shared,
    shared_at_once,
    unique,
    volatile,
)
from prefixproxy.bench.show import as_json, tables
from prefixproxy.facts.report import RunFacts
from prefixproxy.types import Usage

SIZES = Sizes(lanes=3, root=1000)
FACTS = RunFacts("http://127.0.0.1:8080", "llama-server", "b1", "tiny", 4, 4096, False, "f16", "f16")


def brief(nonce: str, tokens: int) -> str:
    return f"{nonce} " + "w" * tokens


def request(cached: int, evaluated: int, prompt_ms: float | None = None) -> Request:
    return Request(2.0, 1.0, Usage(cached + evaluated, cached, evaluated, 16, prompt_ms))


def run(*requests: Request, spent: Spent | None = None) -> Run:
    return Run(sum(one.wall_s for one in requests), requests, spent)


def measured(arm: Arm, root: int | None = 1000, **runs: Run) -> Measured:
    found = Measured(arm, root)
    for name, one in runs.items():
        found.add(Scenario[name], one)
    return found


CONTROL = run(*[request(0, 1010, 1000.0)] * 3)
STRAIGHT = measured(
    Arm.STRAIGHT,
    UNIQUE=CONTROL,
    SHARED=run(*[request(1000, 10, 80.0)] * 3),
    SHARED_AT_ONCE=run(*[request(0, 1010, 2500.0)] * 3),
)
PROXY = measured(
    Arm.PROXY,
    UNIQUE=CONTROL,
    SHARED=run(*[request(1000, 10, 60.0)] * 3),
    SHARED_AT_ONCE=run(*[request(1000, 10, 50.0)] * 3, spent=Spent(1030, 1200.0)),
)
TARGET = Target("llama-server", FACTS, [STRAIGHT, PROXY])
REPORT = Report(SIZES, 3, (TARGET,))


def test_no_two_runs_share_a_prefix_and_the_lanes_of_one_do() -> None:
    first, second = unique(SIZES, "a", brief), unique(SIZES, "b", brief)
    heads = [wave.prompts[0][0]["content"] for wave in (*first, *second)]
    assert len({head.split(" ")[0] for head in heads}) == 6
    [warm, *lanes] = shared(SIZES, "c", brief)
    assert (warm.counted, [wave.counted for wave in lanes]) == (False, [True] * 3)
    assert len({wave.prompts[0][0]["content"] for wave in (warm, *lanes)}) == 1
    assert len({wave.prompts[0][1]["content"] for wave in (warm, *lanes)}) == 4
    [together] = shared_at_once(SIZES, "d", brief)
    assert len(together.prompts) == 3


def test_the_volatile_front_is_another_in_every_lane() -> None:
    waves = volatile(SIZES, "e", ["10:00", "10:01", "10:02", "10:03"], brief)
    firsts = [wave.prompts[0][0]["content"].split("\n")[0] for wave in waves]
    assert firsts[0] == "Current time: 10:03  Lane: 3  Run: e"
    assert len(set(firsts)) == 4
    assert [wave.counted for wave in waves] == [False, True, True, True]


def test_continuations_extend_and_the_reducer_quotes() -> None:
    prompts = list(shared_at_once(SIZES, "f", brief)[0].prompts)
    second = continued(prompts, ["one", "two", "three"])
    assert [prompt[:2] for prompt in second] == prompts
    assert [prompt[2]["content"] for prompt in second] == ["one", "two", "three"]
    assert len(one_by_one(second)) == 3
    [[merging]] = [wave.prompts for wave in reducer(SIZES, "g", ["one", "two"], brief)]
    assert "Agent 1: one\nAgent 2: two" in merging[1]["content"]
    assert not merging[0]["content"].startswith(prompts[0][0]["content"][:5])


def test_requests_are_counted_beforehand() -> None:
    waves = [
        *unique(SIZES, "a", brief),
        *shared(SIZES, "b", brief),
        *reducer(SIZES, "c", ["x"], brief),
        *shared_at_once(SIZES, "d", brief),
        *volatile(SIZES, "e", list("0123"), brief),
    ]
    assert SIZES.requests == sum(len(wave.prompts) for wave in waves) + 2 * SIZES.lanes


def test_ratios_are_to_the_straight_control_with_warm_ups_paid_for() -> None:
    shared_ratio = TARGET.ratio(STRAIGHT, Scenario.SHARED)
    assert shared_ratio is not None
    assert shared_ratio.middle == pytest.approx(0.08)
    paid = TARGET.ratio(PROXY, Scenario.SHARED_AT_ONCE)
    assert paid is not None
    assert paid.middle == pytest.approx(0.4)
    tokens = [TARGET.token_ratio(arm, Scenario.SHARED_AT_ONCE) for arm in TARGET.arms]
    assert [round(one.middle, 2) for one in tokens if one] == [1.0, 0.34]


def test_roots_that_were_found_are_counted_and_unknown_is_not_zero() -> None:
    assert STRAIGHT.found_share(Scenario.SHARED) == 1.0
    assert STRAIGHT.found_share(Scenario.SHARED_AT_ONCE) == 0.0
    assert STRAIGHT.found_share(Scenario.UNIQUE) is None
    silent = measured(Arm.STRAIGHT, SHARED=run(Request(1.0, None, Usage(prompt_ms=80.0))))
    assert (silent.found_share(Scenario.SHARED), silent.cached_share(Scenario.SHARED)) == (None, None)
    assert (silent.ttft_s(Scenario.SHARED), silent.evaluated(Scenario.SHARED)) == (None, None)
    assumed = measured(Arm.STRAIGHT, None, SHARED=run(request(950, 50), request(100, 900)))
    assert assumed.found_share(Scenario.SHARED) == 0.5


def test_where_no_times_are_told_ratios_are_of_tokens() -> None:
    timeless = measured(Arm.STRAIGHT, UNIQUE=run(request(0, 1000)), SHARED=run(request(900, 100)))
    target = Target("server", FACTS, [timeless])
    ratio = target.ratio(timeless, Scenario.SHARED)
    assert ratio is not None
    assert ratio.middle == pytest.approx(0.1)
    told = doubts(Report(SIZES, 3, (target,)))
    assert "server: it reports no prompt times; ratios are of evaluated tokens" in told
    assert "server: only straight was measured" in told


def test_what_the_numbers_cannot_say_is_said() -> None:
    assert doubts(REPORT) == []
    assert doubts(replace(REPORT, repeat=1))[0].startswith("one run of each scenario: a spread needs 3")
    assert "5 lanes on 4 slots" in doubts(replace(REPORT, sizes=Sizes(5, 1000)))[0]
    restless = Target(
        "s", FACTS, [measured(Arm.STRAIGHT, UNIQUE=run(request(0, 9, 100.0), request(0, 9, 200.0))), PROXY]
    )
    assert any("the machine was not at rest" in doubt for doubt in doubts(replace(REPORT, targets=(restless,))))
    reused = Target("s", FACTS, [measured(Arm.STRAIGHT, UNIQUE=run(request(900, 9, 100.0))), PROXY])
    assert any("this is no control" in doubt for doubt in doubts(replace(REPORT, targets=(reused,))))
    silent = Target("s", FACTS, [measured(Arm.STRAIGHT, UNIQUE=run(Request(1, 1, Usage(prompt_ms=9.0)))), PROXY])
    assert any("it reports no cached tokens" in doubt for doubt in doubts(replace(REPORT, targets=(silent,))))
    other = replace(FACTS, url="http://127.0.0.1:8081", n_ctx_slot=1365)
    two = replace(REPORT, targets=(TARGET, Target("other", other, [STRAIGHT, PROXY])))
    assert any("n_ctx_slot: 4,096 on" in doubt for doubt in doubts(two))


def text_of(report: Report) -> str:
    console = Console(width=118, file=io.StringIO())
    with console.capture() as captured:
        for table in tables(report):
            console.print(table)
    return captured.get()


def test_the_table_has_a_row_for_each_arm_of_each_scenario_and_cuts_nothing() -> None:
    text = text_of(REPORT)
    assert "…" not in text
    assert "shared root, one by one" in text
    assert text.count("proxy") == 3
    beside = text_of(replace(REPORT, targets=(TARGET, replace_name(TARGET))))
    assert "side by side" in beside
    assert "0.08, 100 %" in beside


def replace_name(target: Target) -> Target:
    return Target("ollama", target.facts, target.arms)


def test_the_drawing_is_well_formed_with_a_mark_for_each_arm() -> None:
    drawn = ElementTree.fromstring(as_svg(REPORT))
    name = "{http://www.w3.org/2000/svg}"
    assert len(drawn.findall(f"{name}circle")) == 1 + 3
    assert len(drawn.findall(f"{name}rect")) == 1 + 1 + 3
    assert as_svg(Report(SIZES, 1, ())).startswith("<svg")


def test_json_has_every_run_and_null_for_what_is_unknown() -> None:
    told = as_json(REPORT)
    shared_run = told["targets"][0]["arms"][0]["scenarios"][1]
    assert shared_run["name"] == "shared root, one by one"
    assert shared_run["ratio"]["median"] == pytest.approx(0.08)
    assert shared_run["runs"][0]["spent"] is None
    assert shared_run["runs"][0]["requests"][0]["cache_n"] == 1000
    assert told["ok"] is True
