"""doctor's checks on made-up evidence: what each finds, what it leaves alone, and how it is shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixproxy.backends.llamacpp_idle import emptied
from prefixproxy.doctor.admission import Answered, admission_findings, loops
from prefixproxy.doctor.checks import llama_server_findings
from prefixproxy.doctor.evidence import Demand, Evidence, ModelFile
from prefixproxy.doctor.findings import Finding, Severity, error, worst_first
from prefixproxy.doctor.ollama import ollama_findings
from prefixproxy.doctor.show import Examined, Report, as_json, report_lines
from prefixproxy.doctor.template import FIRST, TOOL_NAME, Rendered, template_findings
from prefixproxy.doctor.trial import FILE, PROMPT_TOKENS, Trial, attempt
from prefixproxy.facts.flags import read_flags
from prefixproxy.facts.log import read_log
from prefixproxy.facts.report import RunFacts
from prefixproxy.types import Capabilities

URL = "http://127.0.0.1:8080"
CAN = Capabilities(pin=True, observe=True, snapshot=True, reports_cached=True, native=True)
RECOMMENDED = "-np 4 -c 32768 --no-kv-unified --slots --metrics --slot-save-path /dev/shm/slots/"


def evidence(argv: str = RECOMMENDED, n_slots: int = 4, n_ctx_slot: int = 8192, **more: Any) -> Evidence:
    flags = read_flags(argv.split())
    facts = RunFacts(
        URL,
        "llama-server",
        n_slots=n_slots,
        n_ctx_slot=n_ctx_slot,
        kv_unified=flags.unified,
        kv_type_k=flags.type_k or "f16",
        kv_type_v=flags.type_v or "f16",
    )
    return Evidence(facts, more.pop("capabilities", CAN), flags=flags, **more)


def found(seen: Evidence) -> dict[str, Finding]:
    return {finding.name: finding for finding in llama_server_findings(seen)}


def severities(seen: Evidence) -> dict[str, str]:
    return {name: str(finding.severity) for name, finding in found(seen).items()}


def test_the_recommended_flags_give_no_finding() -> None:
    assert found(evidence()) == {}


def test_the_silent_division_is_told_with_its_numbers_and_the_flags_that_undo_it() -> None:
    one = found(evidence("-np 6 -c 8192 --slot-save-path d/", 6, 1536))["context-divided"]
    assert one.severity is Severity.ERROR
    assert "-c 8,192 divided by 6 slots is 1,365: n_ctx_slot is 1,536" in one.evidence
    assert one.fix.startswith("-np 6 -c 24576")


@pytest.mark.parametrize(
    ("n_ctx_slot", "minimum", "expected"),
    [
        (2047, 0, {"context-small": "error"}),
        (2048, 0, {"context-small": "warning"}),
        (4096, 0, {}),
        (4096, 4097, {"context-small": "error"}),
        (1024, 1024, {}),
    ],
)
def test_a_minimum_of_the_settings_takes_the_place_of_our_own(
    n_ctx_slot: int, minimum: int, expected: dict[str, str]
) -> None:
    seen = evidence(f"-np 1 -c {n_ctx_slot} --slot-save-path d/", 1, n_ctx_slot, demand=Demand(min_n_ctx_slot=minimum))
    assert severities(seen) == expected


def test_a_prompt_that_was_too_long_is_told() -> None:
    assert "context-exceeded" in found(evidence(demand=Demand(longest_prompt=9000)))


@pytest.mark.parametrize(
    ("argv", "keeps_idle", "expected"),
    [
        ("-c 32768", None, "error"),
        ("-np 4 -kvu", None, "error"),
        ("-np 4 -kvu --cache-ram 0", None, "warning"),
        ("-np 4 -kvu --no-cache-idle-slots", None, "warning"),
        ("-np 4 -kvu --no-cache-idle-slots", False, "error"),
        ("-np 4", False, "error"),
        ("-np 4", True, None),
    ],
)
def test_a_unified_pool_defeats_pinning_unless_idle_slots_stay(
    argv: str, keeps_idle: bool | None, expected: str | None
) -> None:
    seen = evidence(f"{argv} --slot-save-path d/", trial=Trial(keeps_idle=keeps_idle))
    assert severities(seen).get("kv-unified") == expected


def test_what_nobody_can_tell_is_a_note_that_asks_for_the_log() -> None:
    known = evidence()
    seen = replace(known, flags=None, facts=replace(known.facts, kv_unified=None))
    assert severities(seen) == {"kv-unified-unknown": "note"}
    assert severities(replace(seen, trial=Trial(keeps_idle=True))) == {}


def test_a_ram_cache_that_is_off_or_too_small_for_what_was_seen() -> None:
    assert "ram-cache-off" in found(evidence(RECOMMENDED + " --cache-ram 0"))
    seen = evidence(
        RECOMMENDED + " --cache-ram 100",
        demand=Demand(conversations=3, conversation_tokens=10_000),
        model=ModelFile("llama", kv_bytes_per_token=20_000),
    )
    small = found(seen)["ram-cache-small"]
    assert "3 conversations of 10,000 tokens together take 191 MiB, --cache-ram is 100" in small.evidence
    assert small.fix == "--cache-ram 229"
    assert found(replace(seen, model=None)) == {}
    assert found(replace(seen, flags=read_flags((RECOMMENDED + " --cache-ram -1").split()))) == {}


def test_the_startup_log_is_stronger_than_the_flags() -> None:
    off = read_log(["srv load_model: prompt cache is disabled - use `--cache-ram N` to enable it"])
    assert "ram-cache-off" in found(evidence(log=off))


def test_a_server_that_shows_no_slots_cannot_be_pinned() -> None:
    assert severities(evidence(capabilities=Capabilities())) == {"slots-hidden": "error"}
    assert severities(evidence(capabilities=replace(CAN, snapshot=False))) == {"no-save-path": "warning"}
    assert severities(evidence(save_dir_open=True)) == {"save-path-open": "warning"}


@pytest.mark.parametrize(("given_tokens", "expected"), [(48, None), (43, None), (0, "error")])
def test_a_restore_that_gives_nothing_is_an_error(given_tokens: int, expected: str | None) -> None:
    seen = evidence(trial=Trial(keeps_idle=True, restored=(48, given_tokens), ram_cache=True))
    assert severities(seen).get("restore-without-effect") == expected


def test_a_proxy_that_gave_up_on_snapshots_is_heard() -> None:
    behind = {"scheduler": {"snapshots_off_because": "two in a row gave nothing"}}
    assert "two in a row" in found(evidence(behind=behind))["restore-without-effect"].evidence
    off = {"scheduler": {"snapshots_off_because": "reuse is off"}, "reuse_off": "verify failed"}
    assert found(evidence(behind=off)) == {}, "that is another finding"


def used(*tokens: int | None) -> list[dict[str, Any]]:
    """Slots of a server, with the tokens they hold; None: never used."""
    return [
        {"id": i, "id_task": -1 if n is None else i, "n_prompt_tokens": n or 0, "is_processing": False}
        for i, n in enumerate(tokens)
    ]


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ((53, 0, 0, 0), 3),
        ((53, 0, 0, None), 2),
        ((0, 0, None, None), 2),
        ((53, 0, None, None), 0),
        ((53, 48, 0, 0), 0),
        ((None, None, None, None), 0),
        ((53, 48, 48, 48), 0),
    ],
)
def test_slots_that_were_used_and_are_empty_show_a_unified_pool(tokens: Sequence[int | None], expected: int) -> None:
    assert emptied(used(*tokens)) == expected
    seen = evidence(trial=Trial(not_tried="used", emptied=expected))
    unknown = replace(seen, flags=None, facts=replace(seen.facts, kv_unified=None))
    assert severities(unknown)["kv-unified" if expected else "kv-unified-unknown"] == ("error" if expected else "note")
    assert "kv-unified" not in found(seen), "what its command line says is stronger"


def test_a_window_needs_its_full_cache() -> None:
    model = ModelFile("gemma3", n_swa=1024)
    assert severities(evidence(model=model)) == {"swa-not-full": "warning"}
    assert severities(evidence(RECOMMENDED + " --swa-full", model=model)) == {}
    shown_to_work = Trial(keeps_idle=True, restored=(144, 139))
    assert severities(evidence(model=model, trial=shown_to_work)) == {"swa-not-full": "note"}


def test_a_quantised_cache_is_to_be_verified() -> None:
    seen = evidence(RECOMMENDED + " -ctk q8_0")
    assert severities(seen) == {"kv-quantised": "warning"}
    assert severities(replace(seen, verified=True)) == {}
    assert severities(replace(seen, verified=False)) == {"kv-quantised": "warning", "verify-failed": "error"}


def test_an_architecture_with_recorded_corruption_starts_with_reuse_off() -> None:
    seen = evidence(model=ModelFile("kimi-linear"), recorded_corruption=True)
    assert "prefixproxy verify" in found(seen)["recorded-corruption"].fix
    assert found(replace(seen, verified=True)) == {}


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        ("--sleep-idle-seconds 60", "sleeps"),
        ("--no-cache-prompt", "cache-prompt-off"),
        ("--context-shift", "context-shift"),
        ("--cache-reuse 256", "cache-reuse"),
    ],
)
def test_switches_that_cost_prefixes(argv: str, name: str) -> None:
    assert set(found(evidence(f"{RECOMMENDED} {argv}"))) == {name}


def test_a_sleeping_server_is_told_even_without_its_flags() -> None:
    assert "sleeps" in found(replace(evidence(props={"is_sleeping": True}), flags=None))


TEMPLATE = "{{ messages }}"
PLAIN = Rendered(
    f"sys|{FIRST}|", f"sys|{FIRST}|answer|more|", (f"{TOOL_NAME}|{FIRST}|", f"{TOOL_NAME}|{FIRST}|answer|")
)


def template(rendered: Rendered | None, text: str = TEMPLATE) -> dict[str, Finding]:
    return {finding.name: finding for finding in template_findings(text, rendered, ["29 Nov 2026"])}


def test_a_template_that_only_appends_is_fine() -> None:
    assert template(PLAIN) == {}


def test_a_date_is_found_where_it_is_rendered() -> None:
    dated = replace(PLAIN, first=f"Today Date: 29 Nov 2026|{FIRST}|", second=f"Today Date: 29 Nov 2026|{FIRST}|x|")
    assert "29 Nov 2026" in template(dated)["template-date"].evidence
    assert template(PLAIN, "{% if no_system %}{{ strftime_now('%d') }}{% endif %}") == {}
    assert "strftime_now" in template(None, "{{ strftime_now('%d') }}")["template-date"].evidence


def test_tools_that_move_to_the_last_message_are_found() -> None:
    moving = replace(PLAIN, with_tools=(f"sys|{TOOL_NAME}|{FIRST}|", f"sys|{FIRST}|answer|{TOOL_NAME}|more|"))
    assert set(template(moving)) == {"template-moves-tools"}
    none = template(replace(PLAIN, with_tools=(f"sys|{FIRST}|", f"sys|{FIRST}|answer|")))
    assert none["template-no-tools"].severity is Severity.NOTE


def test_a_template_that_rewrites_the_front_is_found() -> None:
    rewritten = template(replace(PLAIN, second=f"sys, 2 turns|{FIRST}|answer|more|"))
    assert "part after 3 characters" in rewritten["template-rewrites-turns"].evidence


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        (list(range(300)), False),
        ([1, 2, 3] * 30, True),
        (list(range(200)) + [7] * 64, True),
        ([7] * 20, False),
        ([*([1, 2, 3] * 30), 9], False),
    ],
)
def test_a_loop_is_an_end_that_repeats(pieces: list[int], expected: bool) -> None:
    assert loops(pieces) is expected


@settings(deadline=None)
@given(st.lists(st.integers(0, 50), max_size=60), st.lists(st.integers(0, 50), min_size=1, max_size=40))
def test_whatever_repeats_often_enough_is_a_loop(start: list[int], period: list[int]) -> None:
    assert loops(start + period * (4 + 64 // len(period)))


GOOD = Answered(3840, 3840, 256, True, tuple(range(256)))


@pytest.mark.parametrize(
    ("answer", "control", "expected"),
    [
        (GOOD, None, ("admission", "note")),
        (Answered(3840, failure="500 no memory"), None, ("admission-failed", "error")),
        (replace(GOOD, prompt_tokens=2000), None, ("admission-prompt-cut", "error")),
        (replace(GOOD, predicted=1, pieces=(1,)), None, ("admission-truncated", "error")),
        (replace(GOOD, predicted=1, cut=False, pieces=(1,)), None, ("admission", "note")),
        (replace(GOOD, pieces=(1, 2) * 128), GOOD, ("admission-loop", "error")),
        (replace(GOOD, pieces=(1, 2) * 128), replace(GOOD, pieces=(3,) * 256), ("admission-model-loops", "warning")),
    ],
)
def test_the_admission_test_tells_why_it_fails(
    answer: Answered, control: Answered | None, expected: tuple[str, str]
) -> None:
    (finding,) = admission_findings(answer, control, "-c 99")
    assert (finding.name, str(finding.severity)) == expected


class FakeServer:
    """Slots of token lists, with the three things that can be wrong with them."""

    def __init__(self, n_slots: int, *, clears: bool = False, restores: bool = True, ram: bool = True) -> None:
        self.slots: list[list[int]] = [[] for _ in range(n_slots)]
        self.used = [0] * n_slots
        self.clears, self.restores, self.ram = clears, restores, ram
        self.kept: list[list[int]] = []
        self.files: dict[str, list[int]] = {}
        self.hollow: set[int] = set()
        """Slots whose tokens are listed though their state is not there."""
        self.evaluated = 0

    async def evaluate(self, tokens: Sequence[int]) -> tuple[int, int]:
        shared = [common(held, tokens) for held in self.slots]
        best = max(range(len(self.slots)), key=lambda i: shared[i])
        slot = best if shared[best] > 0.1 * len(tokens) else min(range(len(self.slots)), key=lambda i: self.used[i])
        reused = 0 if slot in self.hollow else shared[slot]
        self.hollow.discard(slot)
        if self.ram:
            if slot != best or not shared[best]:
                reused = max([reused, *(common(kept, tokens) for kept in self.kept)])
            self.kept += [list(held) for held in self.slots]
        if self.clears:
            self.slots = [held if i == slot else [] for i, held in enumerate(self.slots)]
        self.slots[slot] = list(tokens)
        self.evaluated += len(tokens) - reused
        self.used[slot] = max(self.used) + 1
        return slot, reused

    async def held(self) -> Mapping[int, int]:
        return {i: len(held) for i, held in enumerate(self.slots)}

    async def save(self, slot: int, file: str) -> int:
        self.files[file] = self.slots[slot]
        return len(self.slots[slot])

    async def restore(self, slot: int, file: str) -> int:
        self.slots[slot] = self.files[file]
        if not self.restores:
            self.hollow.add(slot)
        return len(self.files[file])

    async def erase(self, slot: int) -> None:
        self.slots[slot] = []


def common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


async def tried(server: FakeServer, **more: Any) -> Trial:
    trial = Trial()
    await attempt(server, trial, len(server.slots), can_save=True, **more)
    return trial


@pytest.mark.anyio
@pytest.mark.parametrize("n_slots", [1, 2, 4, 8])
async def test_a_sound_server_passes_the_trial_cheaply(n_slots: int) -> None:
    server = FakeServer(n_slots)
    trial = await tried(server)
    assert trial.keeps_idle is (True if n_slots > 1 else None)
    assert (trial.restored, trial.restore_works, trial.ram_cache) == ((48, 48), True, True)
    assert server.evaluated <= (n_slots + 4) * (PROMPT_TOKENS + 5)
    assert list(server.files) == [FILE]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("wrong", "found_out"),
    [({"clears": True}, "keeps_idle"), ({"restores": False}, "restore_works"), ({"ram": False}, "ram_cache")],
)
async def test_each_fault_shows_in_the_trial(wrong: dict[str, bool], found_out: str) -> None:
    trial = await tried(FakeServer(4, **wrong))
    names = ("keeps_idle", "restore_works", "ram_cache")
    assert {name for name in names if getattr(trial, name) is False} == {found_out}


@pytest.mark.anyio
async def test_what_is_saved_reaches_beyond_a_window() -> None:
    trial = await tried(FakeServer(2), n_swa=1024)
    assert trial.restored is not None
    assert trial.restored[0] > 1024


OLLAMA = RunFacts("http://o", "ollama", build="0.33.3", n_slots=2, tokens="reported by the server")


def ollama(
    *, n_slots: int = 4, n_ctx: int | None = 16384, one_slot: bool = False, cached: bool = True, **more: Any
) -> Evidence:
    running = [{"name": "tiny:latest", "family": "llama", "n_ctx": n_ctx, "one_slot": one_slot}]
    can = Capabilities(reports_cached=cached)
    return Evidence(replace(OLLAMA, n_slots=n_slots), can, reported={"running": running}, **more)


@pytest.mark.parametrize(
    ("seen", "version", "unloads_in_s", "expected"),
    [
        (ollama(), (0, 33, 3), 1e9, {}),
        (ollama(n_slots=1), (0, 33, 3), None, {"one-slot": "warning"}),
        (ollama(n_slots=1, one_slot=True), (0, 33, 3), None, {"one-slot-model": "warning"}),
        (ollama(n_ctx=4096), (0, 33, 3), None, {"context-small": "warning"}),
        (ollama(demand=Demand(min_n_ctx_slot=32768)), (0, 33, 3), None, {"context-small": "error"}),
        (ollama(), (0, 33, 3), 240.0, {"keep-alive": "warning"}),
        (ollama(cached=False), (0, 31, 0), None, {"cached-inferred": "note"}),
        (ollama(cached=False), (0, 30, 0), None, {"counts-differ": "warning", "cached-inferred": "note"}),
        (ollama(cached=False), (0, 24, 0), None, {"old-engine": "warning", "cached-inferred": "note"}),
        (ollama(), None, None, {"version-unknown": "note"}),
        (ollama(behind={"reported": {"truncated_prompts": 3}}), (0, 33, 3), None, {"prompts-cut": "error"}),
    ],
)
def test_what_is_wrong_with_an_ollama(
    seen: Evidence, version: tuple[int, ...] | None, unloads_in_s: float | None, expected: dict[str, str]
) -> None:
    assert {f.name: str(f.severity) for f in ollama_findings(seen, version, unloads_in_s)} == expected


def test_an_ollama_without_a_loaded_model_tells_little() -> None:
    seen = Evidence(replace(OLLAMA, n_slots=4), Capabilities(reports_cached=True))
    assert [f.name for f in ollama_findings(seen, (0, 33, 3), None)] == ["nothing-loaded"]


def test_the_report_begins_with_the_facts_and_the_worst_comes_first() -> None:
    findings = llama_server_findings(evidence("-kvu -np 6 -c 8192 --cache-ram 0", 6, 1536, save_dir_open=True))
    report = Report((), [Examined("local", URL, evidence().facts, findings)])
    lines = report_lines(report)
    assert lines[0].startswith("server")
    assert [f.severity for f in worst_first(findings)] == sorted(
        (f.severity for f in findings), key=list(Severity).index
    )
    assert lines[-1].startswith("1 error, ")
    assert max(map(len, lines)) <= 120
    told = as_json(report)
    assert told["ok"] is False
    assert told["upstreams"][0]["findings"][0]["severity"] == "error"


def test_a_report_without_an_upstream_is_not_fine() -> None:
    assert not Report(("nothing",), []).ok
    fine = report_lines(Report((), [Examined("local", URL, evidence().facts, [])]))
    assert fine[0].startswith("server ")
    assert fine[-1] == "Nothing here defeats reuse."


def test_what_was_not_looked_at_is_not_called_sound() -> None:
    seen = evidence(trial=Trial(not_tried="the server has been used"))
    lines = report_lines(Report((), [Examined("local", URL, seen.facts, llama_server_findings(seen))]))
    assert lines[-1] == "Nothing that was seen defeats reuse; not seen: not-tried."


def test_the_report_on_a_server_that_was_not_reached_says_that_nothing_is_known() -> None:
    down = error("unreachable", "upstream cannot be reached", "why")
    lines = report_lines(Report((), [Examined("local", URL, None, [down])]))
    assert lines[0] == f"server           nothing that is known at {URL}"
    assert "n_ctx_slot       unknown" in lines
