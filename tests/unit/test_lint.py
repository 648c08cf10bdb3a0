"""Lint reads any spelling of request bodies, finds the first difference, and says what the proxy would do about it."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from prefixproxy.answers import AnswerMemory
from prefixproxy.body import Body
from prefixproxy.chat import Canonical, canonical, parse_prompt
from prefixproxy.errors import UsageError
from prefixproxy.lint.command import usable_tokenizer
from prefixproxy.lint.compare import Comparison, TokenCounter, Verdict, compare, shown
from prefixproxy.lint.input import Sample, guess_api, read_input
from prefixproxy.lint.report import Pair, Report, Setup, examine
from prefixproxy.lint.rules import When, tools_detail
from prefixproxy.lint.show import as_json, print_report
from prefixproxy.plan import Planner
from prefixproxy.prefix import shared_bytes
from prefixproxy.stabilise.stabiliser import StabilisePolicy, Stabiliser
from prefixproxy.tools import ToolMemory
from prefixproxy.types import Api
from prefixproxy.volatile.files import load_rules

ROOT = Path(__file__).parent.parent.parent
CASES = ROOT / "tests" / "golden" / "cases"
PAGE = (ROOT / "docs" / "howto" / "lint.md").read_text(encoding="utf-8")
RULES = load_rules()

ARCHIVE = (
    "You are the desk assistant of a small map archive. Answer from the catalogue rules below.\n"
    "Rule one: every sheet is named by its region, scale and printing house.\n"
    "Rule two: a sheet that is folded is stored flat after it has been photographed."
)
KITCHEN = (
    "Plan a dinner for six from the larder list. Ask about allergies before anything else.\n"
    "Start with what spoils first. Give amounts in grams.\nNever serve raw eggs to children."
)
FILLER = "Rule three: loans leave the building only in a tube and with two signatures."


def body(system: str, *said: str, model: str = "m", **more: Any) -> dict[str, Any]:
    """A chat body: the system text, then user and assistant in turns."""
    roles = ("user", "assistant")
    turns = [{"role": roles[i % 2], "content": text} for i, text in enumerate(said)]
    return {"model": model, "messages": [{"role": "system", "content": system}, *turns], **more}


def samples_of(*bodies: Any) -> list[Sample]:
    return read_input([("in", json.dumps(list(bodies)).encode())], None).samples


def linted(*bodies: Any, setup: Setup | None = None) -> Report:
    count, tokenizer, note = usable_tokenizer()
    return examine(samples_of(*bodies), setup or Setup(RULES), TokenCounter(count), tokenizer, note)


def only(report: Report) -> Pair:
    (pair,) = report.pairs
    return pair


def text_of(report: Report, width: int = 80) -> str:
    out = io.StringIO()
    print_report(report, Console(file=out, highlight=False, width=width))
    return out.getvalue()


def form(value: dict[str, Any]) -> Canonical:
    return canonical(samples_of(value)[0].prompt)


def compared(earlier: dict[str, Any], later: dict[str, Any]) -> Comparison:
    return compare(form(earlier), form(later), TokenCounter(None))


# What goes in


def read(raw: bytes, path: str | None = None) -> list[Sample]:
    return read_input([("file", raw)], path).samples


A, B = b'{"model":"m","messages":[]}', b'{"prompt":"x"}'


@pytest.mark.parametrize(
    ("raw", "places"),
    [
        (A, [""]),
        (b"\n " + A + b"\n\n", [""]),
        (b"\xef\xbb\xbf" + A, [""]),
        (A + b"\n\n" + B + b"\n", ["line 1", "line 3"]),
        (b"[" + A + b"," + B + b"]", ["item 1", "item 2"]),
        (b'{"requests":[' + A + b"]}", ["item 1"]),
        (b'{"path":"/v1/chat/completions","body":' + A + b"}", [""]),
        (A + b"\n[" + A + b"]", ["line 1", "line 2 item 1"]),
    ],
)
def test_every_spelling_of_bodies_is_read_with_its_place(raw: bytes, places: list[str]) -> None:
    samples = read(raw)
    assert [s.place for s in samples] == places
    assert [s.number for s in samples] == list(range(1, len(places) + 1))
    assert {s.source for s in samples} == {"file"}


def test_numbers_go_on_through_files_and_their_order_is_kept() -> None:
    samples = read_input([("a", A + b"\n" + B), ("b", B)], None).samples
    assert [(s.number, s.source) for s in samples] == [(1, "a"), (2, "a"), (3, "b")]


@pytest.mark.parametrize(
    ("value", "api"),
    [
        ({"messages": []}, Api.CHAT),
        ({"messages": [], "tools": [{"type": "function", "function": {}}]}, Api.CHAT),
        ({"messages": [], "system": "x"}, Api.MESSAGES),
        ({"messages": [], "tools": [{"name": "t", "input_schema": {}}]}, Api.MESSAGES),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, Api.MESSAGES),
        ({"messages": [], "options": {"num_ctx": 1}}, Api.OLLAMA_CHAT),
        ({"input": "x"}, Api.RESPONSES),
        ({"instructions": "x"}, Api.RESPONSES),
        ({"prompt": "x"}, Api.COMPLETIONS),
        ({"prompt": "x", "n_predict": 1}, Api.COMPLETION),
        ({"prompt": "x", "system": "y"}, Api.OLLAMA_GENERATE),
        ({"input_prefix": "x", "input_suffix": "y"}, Api.INFILL),
        ({"model": "m"}, None),
    ],
)
def test_the_api_is_guessed_from_the_shape(value: dict[str, Any], api: Api | None) -> None:
    assert guess_api(value) is api


def test_a_path_beside_the_body_counts_more_than_the_option_and_that_more_than_the_shape() -> None:
    beside = b'{"path":"/v1/messages?beta=true","body":' + A + b"}"
    assert [(s.api, s.guessed) for s in read(beside + b"\n" + A, "/api/chat")] == [
        (Api.MESSAGES, False),
        (Api.OLLAMA_CHAT, False),
    ]
    assert [(s.api, s.guessed) for s in read(A)] == [(Api.CHAT, True)]


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "file: is empty"),
        (b'{"messages": [}', r"file: is not valid JSON \(line 1, column 15\)"),
        (A + b'\n\n{"messages": nope}', r"file line 3: is not valid JSON \(column 14\)"),
        (b'{"messages": NaN}', "file: is not valid JSON: NaN"),
        (b"\xff\xfe", r"file: is not valid UTF-8 \(byte 0\)"),
        (b"[" + A + b", 7]", "file item 2: is no JSON object"),
        (b'{"model": "m"}', r"file: .*no messages, input or prompt \(keys: model\)"),
        (b'{"messages": "x"}', "file: looks like a body of the chat API"),
        (b'{"path": "/v1/responses", "body": {"input": 7}}', "file: should be a body of the responses API"),
        (b'{"path": "/v1/models", "body": {}}', "file: path: '/v1/models' is none of /v1/chat"),
        (b'{"path": "/v1/messages", "body": "{}"}', "file: body: is no JSON object"),
        (b'{"messages": ' + b"[" * 9000 + b"]" * 9000 + b"}", "file: is nested deeper than this proxy reads"),
        (b"[]", "no request body"),
    ],
)
def test_what_is_no_body_is_named_with_its_place(raw: bytes, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        read(raw)


def test_a_journal_export_without_text_is_refused_in_clear_words() -> None:
    record = b'{"id":"1","path":"/v1/messages","miss_reason":"none","cache_source":"reported","prompt_n":3}'
    for raw in (record, record + b"\n" + record, b'{"requests":[' + record + b"]}"):
        with pytest.raises(
            UsageError, match=r"^file: is a journal export .* no prompt text.* journal.store_text = true"
        ):
            read(raw)


def record(number: int, time: float, **more: Any) -> bytes:
    told = {"id": str(number), "time": time, "path": "/v1/chat/completions", "miss_reason": "none"}
    return json.dumps({**told, "cache_source": "reported", "prompt_n": 3, **more}).encode()


def test_a_journal_export_with_text_is_read_in_the_order_of_arrival() -> None:
    early, late = ({"model": "m", "messages": [{"role": "user", "content": text}]} for text in ("early", "late"))
    export = b"\n".join([record(2, 7.5, body=late), record(1, 7.0, body=early), record(3, 8.0, body={"messages": 7})])
    found = read_input([("journal.jsonl", export + b"\n" + record(4, 9.0))], None)
    assert [(s.number, s.place, s.body.data, s.guessed) for s in found.samples] == [
        (1, "line 2", early, False),
        (2, "line 1", late, False),
    ]
    assert found.left_out == 2


def test_an_option_that_names_no_path_is_refused() -> None:
    with pytest.raises(UsageError, match="--path: '/v1/chat' is none of"):
        read(A, "/v1/chat")


# Two prompts side by side


@pytest.mark.parametrize(
    ("earlier", "later", "verdict"),
    [
        (body(ARCHIVE, "Hi"), body(ARCHIVE, "Hi"), Verdict.IDENTICAL),
        (body(ARCHIVE, "Hi"), body(ARCHIVE, "Hi", "Hello.", "And now?"), Verdict.EXTENDS),
        (body(ARCHIVE, "Hi", "Hello.", "And now?"), body(ARCHIVE, "Hi"), Verdict.CONTAINED),
        (body(ARCHIVE, "Where is it?"), body(ARCHIVE, "Who may sign?"), Verdict.BRANCHES),
        (body(ARCHIVE, "Cook."), body(KITCHEN, "Cook."), Verdict.DIFFERENT),
        (body("It is 9:00.\n" + ARCHIVE, "Hi"), body("It is 9:05.\n" + ARCHIVE, "Hi"), Verdict.BREAKS),
        (body(ARCHIVE, FILLER, "Noted.", "Go on."), body(ARCHIVE, "Hm.", "Noted.", FILLER), Verdict.BREAKS),
        ({"prompt": "Root. " * 50 + "One?"}, {"prompt": "Root. " * 50 + "Two?"}, Verdict.BRANCHES),
        ({"prompt": "At 9:00. " + ARCHIVE}, {"prompt": "At 9:05. " + ARCHIVE}, Verdict.BREAKS),
        ({"prompt": ARCHIVE}, {"prompt": KITCHEN}, Verdict.DIFFERENT),
    ],
)
def test_what_a_later_prompt_is_to_an_earlier_one(
    earlier: dict[str, Any], later: dict[str, Any], verdict: Verdict
) -> None:
    assert compared(earlier, later).verdict is verdict


def test_the_same_tools_do_not_make_two_prompts_one() -> None:
    tools = [{"type": "function", "function": {"name": f"tool_{n}", "description": FILLER}} for n in range(40)]
    found = compared(body(ARCHIVE, "Hi", tools=tools), body(KITCHEN, "Hi", tools=tools))
    assert found.verdict is Verdict.DIFFERENT
    assert found.lost > found.kept


def test_a_difference_is_located_in_bytes_and_in_the_clients_lines() -> None:
    found = compared(body("Grüße, 漢字.\nUhr: 一二\n" + ARCHIVE, "x"), body("Grüße, 漢字.\nUhr: 一三\n" + ARCHIVE, "x"))
    where = found.difference
    assert where is not None
    assert (where.segment, where.part, where.line, where.column) == ("system[0]", 1, 2, 7)
    assert (where.same, where.earlier[:2], where.later[:2]) == ("Uhr: 一", "二\\", "三\\")


def test_a_difference_in_the_second_text_of_a_message_counts_from_there() -> None:
    def parts(second: str) -> dict[str, Any]:
        content = [{"type": "text", "text": "one\ntwo"}, {"type": "text", "text": second}]
        return {"messages": [{"role": "system", "content": content}, {"role": "user", "content": ARCHIVE}]}

    where = compared(parts("a\nb"), parts("a\nc")).difference
    assert where is not None
    assert (where.part, where.line, where.column) == (2, 2, 1)


def test_where_one_text_ends_the_excerpt_is_empty_and_stops_at_the_border() -> None:
    where = compared(body("Short", "x"), body("Short and long", "x")).difference
    assert where is not None
    assert (where.same, where.earlier, where.later) == ("Short", "", " and long")


def test_a_difference_outside_of_text_has_no_line() -> None:
    where = compared(body(ARCHIVE, "a", tools=[{"name": "t"}]), body(ARCHIVE, "a", tools=[{"name": "u"}])).difference
    assert where is not None
    assert (where.segment, where.line, where.column) == ("tools", None, None)


def test_lone_surrogates_and_control_characters_are_shown_escaped() -> None:
    where = compared(body("a\ud800\x07b" + ARCHIVE, "x"), body("a\ud800\x07c" + ARCHIVE, "x")).difference
    assert where is not None
    assert where.same == "a\\ud800\\x07"
    assert shown("\x1b[31m\n") == "\\x1b[31m\\n"


def test_a_note_that_is_told_anew_is_not_lost() -> None:
    note = "\n\n[context moved here from the system prompt by prefixproxy]\n" + "The state of the lamp is on. " * 20
    earlier = body(ARCHIVE, "Light?" + note)
    later = body(ARCHIVE, "Light?", "It is on.", "Still?" + note)
    assert compared(earlier, later).verdict is Verdict.BRANCHES
    without_marker = [json.loads(json.dumps(b).replace("by prefixproxy", "by me")) for b in (earlier, later)]
    assert compared(*without_marker).verdict is Verdict.BREAKS


TEXTS = st.text(alphabet="ab.\n é漢", max_size=12)
BODIES = st.builds(lambda head, said: body(head, *said), TEXTS, st.lists(TEXTS, max_size=4))


@given(BODIES, BODIES)
def test_kept_and_behind_are_the_later_prompt_and_the_difference_is_its_first(
    earlier: dict[str, Any], later: dict[str, Any]
) -> None:
    a, b, tokens = form(earlier), form(later), TokenCounter(None)
    found = compare(a, b, tokens)
    assert found.kept >= 0
    assert 0 <= found.lost <= found.behind
    whole_a, whole_b = b"".join(a.parts), b"".join(b.parts)
    shared = shared_bytes(whole_a, whole_b)
    assert whole_a[:shared] == whole_b[:shared]
    if found.difference is None:
        assert shared == min(len(whole_a), len(whole_b))
        assert not found.breaks
    else:
        start = next(start for label, start, _ in b.segments if label == found.difference.segment)
        assert start + found.difference.offset == shared
        assert whole_a[shared] != whole_b[shared]


@given(BODIES, TEXTS)
def test_a_prompt_that_goes_on_never_breaks(earlier: dict[str, Any], more: str) -> None:
    later = {**earlier, "messages": [*earlier["messages"], {"role": "user", "content": more}]}
    assert compared(earlier, later).verdict is Verdict.EXTENDS
    assert compared(later, earlier).verdict is Verdict.CONTAINED


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        ("xy", "xy", ""),
        ("xy", "yx", "the same tools in another order"),
        ("xy", "xyz", "tools added: z"),
        ("xy", "y", "tools gone: x"),
        ("xy", "yz", "tools added: z; gone: x"),
    ],
)
def test_tool_lists_that_differ_are_told_in_words(a: str, b: str, said: str) -> None:
    first, second = (samples_of(body("s", "u", tools=[{"name": n} for n in names]))[0].prompt for names in (a, b))
    assert tools_detail(first, second) == said


def test_a_tool_that_is_described_differently_is_named() -> None:
    old, new = ({"name": "t", "description": d} for d in ("one", "two"))
    first, second = (samples_of(body("s", "u", tools=[t]))[0].prompt for t in (old, new))
    assert tools_detail(first, second) == "the same names, but t spelled or described differently"


# What stabilising does


def test_a_clock_in_the_first_line_is_named_with_its_rule_and_its_cost() -> None:
    report = linted(
        body("Current time: 20:37:19\n" + ARCHIVE, "Hi"),
        body("Current time: 20:37:24\n" + ARCHIVE, "Hi"),
    )
    pair = only(report)
    assert pair.sent.breaks
    assert pair.sent.difference is not None
    assert (pair.sent.difference.segment, pair.sent.difference.line) == ("system[0]", 1)
    assert pair.sent.lost > 40
    assert not pair.stabilised.breaks
    (seen,) = report.requests[1].seen
    assert (seen.line, seen.text, seen.when, seen.acted) == (1, "Current time: 20:37:24", When.FIRST_SIGHT, True)
    assert report.ok
    assert report.suggestions == ()
    shown_text = text_of(report)
    for piece in (seen.rule, "line 1", f"{pair.sent.lost} stand in both", "at first sight", "Nothing breaks"):
        assert piece in re.sub(r"\s+", " ", shown_text)


def test_a_clock_in_the_middle_costs_once_and_then_nothing() -> None:
    def turn(minute: int) -> dict[str, Any]:
        return body(f"{ARCHIVE}\nThe current date and time is 2026-03-14 20:{minute}.\n{FILLER}", "Hi")

    report = linted(turn(31), turn(32), turn(33))
    first, second = report.pairs
    assert (first.stabilised.breaks, first.settled.breaks, second.stabilised.breaks) == (True, False, False)
    assert [[(s.when, s.acted) for s in r.seen] for r in report.requests] == [
        [(When.SEEN_TO_CHANGE, False)],
        [(When.SEEN_TO_CHANGE, True)],
        [(When.SEEN_TO_CHANGE, True)],
    ]
    assert report.ok
    assert "then none" in text_of(report)


def test_a_rule_that_saw_one_value_only_waits() -> None:
    same = body(f"{ARCHIVE}\nThe current date and time is 2026-03-14 20:31.\n{FILLER}", "Hi")
    assert [s.when for r in linted(same, same).requests for s in r.seen] == [When.WAITING, When.WAITING]


def test_text_that_changes_though_no_rule_knows_it_gives_a_rule_that_mends_it() -> None:
    def turn(sheets: int) -> dict[str, Any]:
        return body(f"{ARCHIVE}\nSheets on loan today: {sheets}\n{FILLER}", "Hi")

    report = linted(turn(17), turn(19))
    pair = only(report)
    assert pair.still_breaks
    assert not report.ok
    (one,) = report.suggestions
    assert report.requests[1].taught == (one.name,)
    assert pair.suggested is not None
    assert not pair.suggested.breaks
    text = text_of(report)
    assert one.toml in text
    assert "state and no content" in re.sub(r"\s+", " ", text)

    pasted = load_rules([("mine.toml", one.toml)])
    mended = linted(turn(17), turn(19), setup=Setup(pasted))
    assert mended.ok
    assert mended.suggestions == ()
    assert [s.rule for s in mended.requests[1].seen] == [one.name]
    assert only(mended).settled == pair.suggested


def test_where_learned_is_apply_the_rule_acts_and_is_not_suggested() -> None:
    def turn(sheets: int) -> dict[str, Any]:
        return body(f"{ARCHIVE}\nSheets on loan today: {sheets}\n{FILLER}", "Hi")

    report = linted(turn(17), turn(19), turn(23), setup=Setup(RULES, StabilisePolicy(learned="apply")))
    assert report.ok
    assert report.suggestions == ()
    assert [(s.rule.startswith("learned-"), s.acted) for s in report.requests[2].seen] == [(True, True)]
    assert linted(turn(17), turn(19), setup=Setup(RULES, StabilisePolicy(learned="off"))).suggestions == ()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Always answer in French when asked.", "Always answer in German when asked."),
        ("Be brief.", "Be brief.\nNever touch the red folder."),
        ("Sheets that are torn stay here.", "Sheets that are wet stay here."),
    ],
)
def test_an_instruction_that_changes_gets_no_rule(old: str, new: str) -> None:
    report = linted(body(f"{ARCHIVE}\n{old}\n{FILLER}", "Hi"), body(f"{ARCHIVE}\n{new}\n{FILLER}", "Hi"))
    assert only(report).still_breaks
    assert report.suggestions == ()
    assert report.requests[1].seen == ()
    assert "do not look like state" in re.sub(r"\s+", " ", text_of(report))


def test_two_documents_are_two_prompts() -> None:
    report = linted(body(ARCHIVE, "Summarise it."), body(KITCHEN, "Summarise it."))
    assert only(report).settled.verdict is Verdict.DIFFERENT
    assert report.suggestions == ()
    assert report.ok
    assert "two different prompts" in text_of(report)


def test_interleaved_lanes_are_judged_by_their_own_conversation() -> None:
    def head(lane: str, second: int) -> str:
        return f"Current time: 10:00:{second:02}\nLane id: {lane}\n{ARCHIVE}"

    report = linted(
        body(head("a-1", 1), "Count the maps.", model="x"),
        body(head("b-2", 2), "Count the books.", model="x"),
        body(head("a-1", 3), "Count the maps.", "Seven.", "Go on, please, with the next room.", model="x"),
        body(head("b-2", 4), "Count the books.", "Nine.", "Go on, please, with the next room.", model="x"),
    )
    nearest = {pair.later: pair for pair in report.pairs if pair.nearest}
    assert {later: pair.earlier for later, pair in nearest.items()} == {2: 1, 3: 1, 4: 2}
    assert nearest[3].settled.verdict is nearest[4].settled.verdict is Verdict.EXTENDS
    assert {(p.earlier, p.later) for p in report.pairs if p.previous} == {(1, 2), (2, 3), (3, 4)}
    assert report.ok


def test_requests_of_two_models_are_never_compared() -> None:
    report = linted(body(ARCHIVE, "Hi", model="x"), body(ARCHIVE, "Hi", model="y"), body(ARCHIVE, "Hi", model="x"))
    assert [(p.earlier, p.later) for p in report.pairs] == [(1, 3)]
    assert "Only requests of the same model" in text_of(report)


def test_modes_that_change_nothing_say_so_and_mend_nothing() -> None:
    bodies = [body(f"Current time: 20:37:{n}\n{ARCHIVE}", "Hi") for n in (19, 24)]
    for mode, n_seen in (("observe", 1), ("off", 0)):
        report = linted(*bodies, setup=Setup(RULES, mode=mode))  # type: ignore[arg-type]
        pair = only(report)
        assert pair.sent == pair.stabilised == pair.settled
        assert not report.ok
        assert len(report.requests[1].seen) == n_seen
        assert f'stabilise.mode is "{mode}"' in text_of(report)


def test_one_request_has_nothing_to_be_compared_with() -> None:
    report = linted(body(f"Current time: 20:37:19\n{ARCHIVE}", "Hi"))
    assert report.pairs == ()
    assert report.ok
    assert "at first sight" in text_of(report)
    assert "needs two requests" in text_of(report)


def test_shuffled_tools_and_respelled_calls_are_put_back() -> None:
    def call(arguments: str) -> dict[str, Any]:
        return {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "read", "arguments": arguments}}],
        }

    tools = [{"type": "function", "function": {"name": n, "description": FILLER}} for n in ("read", "write", "list")]
    first = body(ARCHIVE, "Read it.", tools=tools)
    result = {"role": "tool", "tool_call_id": "c1", "content": "Rule two: a sheet that is folded is stored flat."}
    messages = [*first["messages"], call('{"path": "a.md", "lines": 20}'), result]
    second = {**first, "messages": messages, "tools": tools[::-1]}
    third = {**second, "messages": [*messages[:2], call('{"lines":20,"path":"a.md"}'), *messages[3:]], "tools": tools}
    report = linted(first, second, third)
    assert [pair.sent.breaks for pair in report.pairs] == [True, True]
    assert [pair.settled.verdict for pair in report.pairs] == [Verdict.EXTENDS, Verdict.IDENTICAL]
    assert report.pairs[0].tools == "the same tools in another order"
    assert (report.requests[1].live.tools_restored, report.requests[2].live.calls_restored) == (True, 1)
    text = re.sub(r"\s+", " ", text_of(report))
    assert "in the order and spelling first seen" in text
    assert "1 tool call put back" in text


@pytest.mark.parametrize(
    ("case", "breaks_sent", "breaks_stabilised", "breaks_settled"),
    [
        ("01_billing_line_flattened", 1, 0, 0),
        ("04_billing_messages_api", 1, 0, 0),
        ("05_ha_clock_first_words", 1, 0, 0),
        ("08_openwebui_middle_sentence", 2, 1, 0),
        ("16_opencode_env_first_two_dirs", 2, 1, 0),
        ("20_lane_id_fanout_five", 4, 0, 0),
        ("22_tool_order_shuffled", 2, 0, 0),
        ("23_tool_key_order", 2, 0, 0),
        ("29_mt_clock_head_4_turns", 3, 0, 0),
        ("36_mt_tool_loop_clock", 3, 0, 0),
        ("40_mt_three_lanes_interleaved", 5, 0, 0),
        ("41_args_reserialised", 1, 0, 0),
        ("42_args_really_differ", 1, 1, 1),
        ("44_reminder_moves_to_newest", 2, 2, 2),
        ("45_title_request_between_turns", 0, 0, 0),
        ("50_log_lines_in_user", 0, 0, 0),
        ("52_few_shot_times", 0, 0, 0),
        ("53_fixed_role_date", 0, 0, 0),
        ("60_goose_turn_context_history", 0, 0, 0),
        ("66_instruction_change", 0, 0, 0),
        ("78_image_parts_order", 0, 0, 0),
    ],
)
def test_golden_cases(case: str, breaks_sent: int, breaks_stabilised: int, breaks_settled: int) -> None:
    samples = read_input([(case, (CASES / f"{case}.json").read_bytes())], None).samples
    report = examine(samples, Setup(RULES), TokenCounter(None), "bytes/4")
    summary = as_json(report)["summary"]
    found = [summary[f"breaks_{state}"] for state in ("as_sent", "stabilised", "settled")]
    assert found == [breaks_sent, breaks_stabilised, breaks_settled]
    assert report.suggestions == ()


@pytest.mark.parametrize("case", ["50_log_lines_in_user", "52_few_shot_times", "66_instruction_change"])
def test_in_counter_examples_no_rule_acts(case: str) -> None:
    report = examine(read((CASES / f"{case}.json").read_bytes()), Setup(RULES), TokenCounter(None), "bytes/4")
    assert not any(seen.acted for request in report.requests for seen in request.seen)
    assert [pair.sent for pair in report.pairs] == [pair.settled for pair in report.pairs]


@pytest.mark.parametrize(
    "case", ["08_openwebui_middle_sentence", "34_mt_tool_shuffle_and_clock", "41_args_reserialised"]
)
def test_what_is_compared_is_the_body_that_the_proxy_would_send(case: str) -> None:
    samples = read((CASES / f"{case}.json").read_bytes())
    report = examine(samples, Setup(RULES), TokenCounter(None), "bytes/4")
    planner = Planner(Stabiliser(RULES), ToolMemory(99, 1 << 20), AnswerMemory(99, 1 << 20), "apply")
    for sample, request in zip(samples, report.requests, strict=True):
        for call in sample.prompt.tool_calls[:1]:
            planner.answers.learn(call.id, call.name, '{"path": "plan.py", "max_lines": 20}')
        planner.arrive(sample.api, sample.body, sample.place, 0.0)
        sent = parse_prompt(sample.api, Body.parse(planner.plan(sample.api, sample.body, sample.place, 0.0).rendered()))
        assert sent is not None
        assert respelled(b"".join(canonical(sent).parts)) == respelled(b"".join(request.live.form.parts))


def respelled(text: bytes) -> bytes:
    """Lint cannot know how the server spelled a call's arguments, only that it was always the same way."""
    return text.replace(b'{"max_lines":20,"path":"plan.py"}', b'{"path": "plan.py", "max_lines": 20}')


# What comes out


def varied() -> Report:
    return linted(
        body("Current time: 10:00:01\n" + ARCHIVE + "\nSheets on loan: 17", "Hi", tools=[{"name": "t"}]),
        body("Current time: 10:00:02\n" + ARCHIVE + "\nSheets on loan: 19", "Hi\x1b[31m\ud800", tools=[{"name": "u"}]),
        body("Current time: 10:00:03\n" + ARCHIVE + "\nSheets on loan: 23", "Hi", "Yes?", "漢字 " * 30),
    )


def keys_of(value: Any) -> set[str]:
    if isinstance(value, dict):
        return set(value).union(*map(keys_of, value.values()))
    return set().union(*map(keys_of, value)) if isinstance(value, list) else set()


def test_every_key_of_the_json_is_documented() -> None:
    section = PAGE.partition("## JSON")[2]
    assert keys_of(as_json(varied())) - set(re.findall(r"`([a-z_]+)`", section)) == set()
    assert {v.value for v in (*Verdict, *When)} <= set(re.findall(r"`([a-z_]+)`", section))


def test_the_json_is_json_whatever_the_prompts_hold() -> None:
    out = as_json(varied())
    assert json.loads(json.dumps(out)) == out
    assert "\x1b" not in json.dumps(out, ensure_ascii=False)


@pytest.mark.parametrize("width", [80, 40])
def test_text_fits_its_width_and_is_plain_where_it_is_no_terminal(width: int) -> None:
    text = text_of(varied(), width)
    rules = re.sub(r"(?m)^\w+ = \".*\"$", "", text)
    assert max(map(len, rules.splitlines())) <= width
    assert [line for line in text.splitlines() if line != line.rstrip()] == []
    assert "\x1b" not in text


def test_a_long_input_is_shown_in_full_for_the_first_pairs_only() -> None:
    report = linted(*(body(f"Current time: 10:00:{n:02}\n{ARCHIVE}", "Hi") for n in range(30)))
    text = text_of(report)
    assert text.count("As sent") == 20
    assert text.count("Stabilised") == 29


def test_without_a_tokenizer_four_bytes_are_one_token_and_the_report_says_so() -> None:
    def broken(text: str) -> int:
        raise ValueError("Unknown encoding")

    count, tokenizer, note = usable_tokenizer(broken)
    assert (count, tokenizer) == (None, "bytes/4")
    report = examine(samples_of(body(ARCHIVE, "Hi")), Setup(RULES), TokenCounter(count), tokenizer, note)
    assert report.requests[0].tokens == sum(len(part) // 4 for part in report.requests[0].sent.parts)
    assert "four bytes count as one token" in re.sub(r"\s+", " ", text_of(report))


def test_equal_parts_are_counted_once() -> None:
    asked: list[str] = []

    def count(text: str) -> int:
        asked.append(text)
        return 1

    tokens = TokenCounter(count)
    parts: Sequence[bytes] = (b"\xffuser\xfesame", b"\xffuser\xfesame", b"\xffuser\xfeother")
    assert tokens.of(parts) == 3
    assert asked == ["user\nsame", "user\nother"]


def test_a_long_name_of_a_model_is_cut() -> None:
    shown = text_of(linted(body(ARCHIVE, "Hi", model="m" * 5000), body(ARCHIVE, "Ho", model="m" * 4999 + "n")), 200)
    assert f"model {'m' * 57}..., {'m' * 57}...." in shown
    assert "Only requests of the same model are compared." in shown
    assert len(shown) < 2000
