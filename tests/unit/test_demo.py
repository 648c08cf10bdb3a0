"""The demo's prompts, its arithmetic and its report, without an engine."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from prefixproxy import engine
from prefixproxy.demo import command as demo
from prefixproxy.demo.command import DemoOptions
from prefixproxy.demo.prompt import BYTES_PER_TOKEN, MAX_TOKENS, Lane, briefing
from prefixproxy.demo.show import Board, Report, as_json, report_lines, table_lines
from prefixproxy.demo.wave import LaneRun, Wave
from prefixproxy.errors import UsageError
from prefixproxy.facts.report import RunFacts
from prefixproxy.types import Usage

ROOT = 1000


def lane(number: int, cached: int | None, evaluated: int | None, **more: object) -> LaneRun:
    usage = Usage(cached_tokens=cached, evaluated_tokens=evaluated)
    return LaneRun(number, **{"slot": number % 4, "usage": usage, "ttft_s": 0.5, "wall_s": 1.0, **more})  # type: ignore[arg-type]


def wave(name: str, lanes: list[LaneRun], wall_s: float = 1.0, evaluated: int | None = None) -> Wave:
    return Wave(name, f"the {name} wave", lanes, started=0.0, wall_s=wall_s, evaluated_tokens=evaluated)


def straight() -> Wave:
    return wave("straight", [lane(n, 0, ROOT + 50) for n in range(1, 6)], wall_s=40.0, evaluated=5 * (ROOT + 50))


def cold() -> Wave:
    """The root was paid by a warm-up: no lane evaluated it."""
    return wave("cold", [lane(n, ROOT, 60) for n in range(1, 6)], wall_s=10.0, evaluated=ROOT + 5 * 60)


def report(*waves: Wave) -> Report:
    return Report("small.gguf", 4, 4096, list(waves), root_tokens=ROOT, total_s=60.0)


def test_the_report_begins_with_the_facts_of_both_servers() -> None:
    facts = RunFacts("http://a", "llama-server", n_slots=4, n_ctx_slot=4096, kv_type_k="f16", kv_type_v="f16")
    told = between(facts, replace(facts, url="http://b", flags=("-np", "4", "--no-kv-unified")))
    lines = report_lines(told)
    assert lines[0] == "server           llama-server at http://a"
    assert lines[9] == "behind proxy     -np 4 --no-kv-unified"
    assert lines[10] == ""
    other = between(facts, replace(facts, url="http://b", n_ctx_slot=1024))
    assert "The two cannot be compared: n_ctx_slot: 4,096 on http://a, 1,024 on http://b." in report_lines(other)
    assert as_json(other)["facts"]["proxied"]["n_ctx_slot"] == 1024


def between(straight_facts: RunFacts, proxied: RunFacts) -> Report:
    told = report(straight())
    told.straight, told.proxied = straight_facts, proxied
    return told


def test_two_briefings_differ_in_their_first_line_and_cost_the_same() -> None:
    one, other = (briefing(nonce, 800).splitlines() for nonce in ("ab12cd", "34ef56"))
    assert one[0] != other[0]
    assert one[1:] == other[1:]


@pytest.mark.parametrize("n_tokens", [800, 2600])
def test_a_briefing_has_about_the_length_that_was_asked_for(n_tokens: int) -> None:
    assert n_tokens <= len(briefing("seed", n_tokens)) / BYTES_PER_TOKEN < n_tokens * 1.08


def test_lanes_share_everything_behind_their_first_line() -> None:
    bodies = [Lane(n, 5, "run1", f"2026-10-05T09:14:0{n}+00:00", n).body("the briefing") for n in (1, 2)]
    systems = [body["messages"][0]["content"].split("\n", 1) for body in bodies]
    assert systems[0][1] == systems[1][1] == "the briefing"
    assert systems[0][0] == "Current time: 2026-10-05T09:14:01+00:00  Lane: 1 of 5  Run: run1"
    assert systems[0][0] != systems[1][0]
    assert bodies[0]["messages"][1] != bodies[1]["messages"][1]
    assert (bodies[0]["temperature"], bodies[0]["max_tokens"], bodies[0]["stream"]) == (0, MAX_TOKENS, True)


def test_the_lanes_of_two_waves_share_nothing_behind_the_briefing() -> None:
    questions = [Lane(1, 5, "run", "now", n).body("")["messages"][1]["content"] for n in range(10)]
    assert len({question[:6] for question in questions}) == 10


def test_a_root_that_every_lane_pays_is_counted_once_for_each() -> None:
    assert straight().roots_evaluated(ROOT) == 5
    assert straight().lanes_that_reused(ROOT) == 0
    assert straight().beside_lanes_tokens == 0


def test_a_root_that_a_warm_up_paid_is_counted_though_no_lane_reports_it() -> None:
    assert cold().beside_lanes_tokens == ROOT
    assert cold().roots_evaluated(ROOT) == 1
    assert cold().lanes_that_reused(ROOT) == 5


def test_a_lane_that_found_only_what_stands_before_the_root_has_paid_for_it() -> None:
    assert wave("w", [lane(1, 24, ROOT - 30), lane(2, ROOT // 2, ROOT // 2)], evaluated=1470).roots_evaluated(ROOT) == 1


def test_a_root_found_but_for_its_last_token_counts_as_found() -> None:
    assert wave("w", [lane(1, ROOT - 1, 1), lane(2, ROOT - 2, 2)]).lanes_that_reused(ROOT) == 1


def test_what_was_not_reported_is_not_counted() -> None:
    without_counter = wave("w", [lane(1, 0, ROOT)], evaluated=None)
    without_lane = wave("w", [lane(1, None, None)], evaluated=ROOT)
    assert without_counter.roots_evaluated(ROOT) is None
    assert without_lane.beside_lanes_tokens is None
    assert as_json(report(without_counter))["waves"][0]["roots_evaluated"] is None


def test_the_report_shows_the_servers_numbers_and_the_ratio() -> None:
    text = "\n".join(report_lines(report(straight(), cold())))
    assert "small.gguf, 4 slots of 4096 tokens, 5 lanes at once." in text
    assert "share a root of 1000 tokens" in text
    assert "  wall 40.00 s\n  5,250 tokens evaluated\n  root evaluated 5 times, found by 0 of 5 lanes\n" in text
    assert "  wall 10.00 s, 4.0 times shorter than straight\n" in text
    assert "  1,300 tokens evaluated, 1,000 of them to warm the root\n" in text
    assert "  root evaluated once, found by 5 of 5 lanes\n" in text
    assert "All of it took 60 s." in text


def test_the_json_report_says_the_same() -> None:
    told = orjson.loads(orjson.dumps(as_json(report(straight(), cold()))))
    assert told["ok"] is True
    assert told["root_tokens"] == ROOT
    first, second = told["waves"]
    assert first["speedup"] is None
    assert second["speedup"] == pytest.approx(4.0)
    assert (second["roots_evaluated"], second["lanes_that_reused"]) == (1, 5)
    assert second["lanes"][0] == {
        "lane": 1,
        "state": "done",
        "failure": None,
        "slot": 1,
        "cache_n": ROOT,
        "prompt_n": 60,
        "ttft_s": 0.5,
        "wall_s": 1.0,
    }


def test_a_failed_lane_is_shown_and_yields_no_ratio() -> None:
    broken = wave("cold", [lane(1, None, None, failure="status 500: no", slot=None)], wall_s=1.0)
    told = report(straight(), broken)
    assert told.failed
    assert told.speedup(broken) is None
    assert as_json(told)["ok"] is False
    assert any("failed: status 500: no" in line for line in report_lines(told))


def test_a_demo_that_stopped_says_why() -> None:
    told = Report("small.gguf", 4, 4096, [straight()], failure="the engine did not come up")
    assert told.failed
    assert "The demo stopped: the engine did not come up" in report_lines(told)


def test_a_lane_under_way_shows_dashes_and_its_state() -> None:
    running = Wave("w", "w", [LaneRun(1), LaneRun(2, ttft_s=0.25)], started=10.0)
    lines = table_lines(running, now=12.5)
    assert lines[1].split() == ["1", "-", "-", "-", "-", "2.50", "s", "sent"]
    assert lines[2].split() == ["2", "-", "-", "-", "0.25", "s", "2.50", "s", "answering"]


def test_progress_is_plain_lines_where_there_is_no_terminal() -> None:
    out = io.StringIO()
    board = Board(out)
    with board.shown():
        board.doing("starting")
        board.wave(cold())
        board.lane(cold(), lane(2, ROOT, 60, wall_s=None))
        board.lane(cold(), lane(2, ROOT, 60))
        board.lane(cold(), lane(3, None, None, failure="gone"))
    assert out.getvalue().splitlines() == [
        "starting",
        "the cold wave",
        "  lane 2: first token after 0.50 s",
        "  lane 2: done after 1.00 s, slot 2, cache_n 1000, prompt_n 60",
        "  lane 3 failed: gone",
    ]


def test_without_the_engine_the_demo_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "find_spec", lambda _name: None)
    with pytest.raises(UsageError, match=r"pip install 'prefixproxy\[local\]'"):
        demo.run(DemoOptions())


@pytest.mark.parametrize("lanes", [0, -1, 65])
def test_a_senseless_number_of_lanes_is_refused(lanes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "check_installed", lambda: None)
    model = tmp_path / "m.gguf"
    model.write_bytes(b"GGUF")
    with pytest.raises(UsageError, match="--lanes: from 1 to 64"):
        demo.run(DemoOptions(model=model, lanes=lanes))
