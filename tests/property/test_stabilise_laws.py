"""The laws of the stabiliser, for conversations that take turns on shared heads: lossless, untouched, head-stable,
append-only, idempotent, deterministic, bounded; and where no rule matches, not one byte changes."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from prompting import answer_bytes, body_of, head_text, parsed, rendered

from prefixproxy.body import Body
from prefixproxy.chat import parse_prompt
from prefixproxy.prompt import Role
from prefixproxy.stabilise.notes import SEAM
from prefixproxy.stabilise.stabiliser import Stabilised, StabilisePolicy, Stabiliser
from prefixproxy.types import Api
from prefixproxy.volatile.files import load_rules

RULES = load_rules()
quick = settings(deadline=None, max_examples=60)
"""No deadline: the first example that counts tokens loads the vocabulary."""

STEADY = [
    "You are a coding agent. Read files before you change them.",
    "Never print secrets.",
    "## Rules",
    "- Doors are locked only after the user said so.",
    "",
    "The contract of 2024-03-01 ends at 10:00.",
]
EXAMPLES = ["Examples:", "User: nap"]
"""Behind these a statement may be part of an example: then it is no span, and its head another one each time."""

CLOCKS = [
    "Current time: 10:{m:02}:{s:02}",
    "It is now 10:{m:02}:{s:02} on Saturday, March 14, 2026.",
    "Today's date: 2026-{m1:02}-{s1:02}",
    "Request ID: r-{m}-{s}",
]
LANES = ["Lane: {lane}", "Session: s-{lane}0 | 10:{m:02}:{s:02}", "<env>\n  Working directory: /srv/{lane}\n</env>"]
BLOCKS = ["<memory_context>\n- seen {m} maps and {s} sheets of the archive\n</memory_context>"]


@dataclass
class Lane:
    """One client with its history, as it would resend it: without our notes."""

    name: int
    history: list[dict[str, Any]] = field(default_factory=list)
    last: Stabilised | None = None
    answer: str = ""


def heads(*, of: list[str], examples: bool = False) -> st.SearchStrategy[list[str]]:
    """Templates of heads: steady lines with volatile ones among them, at least one steady line."""
    steady = st.lists(st.sampled_from(STEADY + EXAMPLES * examples), min_size=1, max_size=4)
    volatile = st.lists(st.sampled_from(of), max_size=3, unique=True)
    return st.tuples(steady, volatile, st.randoms(use_true_random=False)).map(_mixed)


def _mixed(parts: tuple[list[str], list[str], Random]) -> list[str]:
    steady, volatile, random = parts
    lines = ["You help.", *steady]
    for line in volatile:
        lines.insert(random.randrange(len(lines) + 1), line)
    return lines


def filled(template: list[str], lane: int, tick: int) -> str:
    values = {"lane": lane, "m": tick // 60 % 60, "s": tick % 60, "m1": tick % 12 + 1, "s1": tick % 28 + 1}
    return "\n".join(line.format(**values) for line in template)


ACTIONS = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from(["say", "say", "loop"]), st.integers(0, 3)), min_size=1, max_size=12
)
"""Whose turn it is, whether the user speaks or a tool has answered, and how far the clock goes on."""


def taken(lane: Lane, action: str) -> None:
    """The client's next request: the answer it got, and what comes behind it."""
    if lane.last is None:
        lane.history.append({"role": "user", "content": "Which rule covers this?"})
        return
    answer = f"Answer {len(lane.history)}."
    lane.history.append({"role": "assistant", "content": answer})
    lane.answer = answer
    role = "user" if action == "say" else "tool"
    lane.history.append({"role": role, "content": f"Text {len(lane.history)}."})


def turn(stabiliser: Stabiliser, template: list[str], lane: Lane, action: str, tick: int) -> tuple[Any, Stabilised]:
    taken(lane, action)
    body = body_of(filled(template, lane.name, tick), [*lane.history])
    prompt = parsed(body)
    return prompt, stabiliser.apply(prompt, float(tick), request_id=f"{lane.name}-{tick}-{len(lane.history)}")


def warmed(template: list[str]) -> Stabiliser:
    """A stabiliser that has seen each span of this head change."""
    stabiliser = Stabiliser(RULES)
    for tick in (3000, 3061):
        stabiliser.observe(parsed(body_of(filled(template, tick % 7, tick), ["u:Hi"])), 0.0)
    return stabiliser


@quick
@given(heads(of=CLOCKS + LANES + BLOCKS, examples=True), ACTIONS)
def test_lossless_and_untouched(template: list[str], actions: list[tuple[int, str, int]]) -> None:
    stabiliser, lanes, tick = Stabiliser(RULES), [Lane(i) for i in range(3)], 0
    for who, action, step in actions:
        tick += step
        lane = lanes[who]
        prompt, done = turn(stabiliser, template, lane, action, tick)
        lane.last = done
        whole = "\n".join(t.text for m in done.prompt.messages for t in m.texts)
        if lane.history[-1]["role"] == "user":
            assert all(line.strip() in whole for line in head_text(prompt).split("\n"))
        n_head = len(prompt.head)
        for sent, forwarded in zip(
            prompt.messages[n_head:], done.prompt.messages[len(done.prompt.head) :], strict=True
        ):
            if sent.role is Role.USER:
                own, seam, note = forwarded.texts[0].text.partition(SEAM)
                assert own == sent.texts[0].text
                assert bool(seam) == bool(note)
            else:
                assert sent == forwarded
        kept = [line for line in head_text(done.prompt).split("\n") if line.strip()]
        sent_lines = iter(head_text(prompt).split("\n"))
        assert all(line in sent_lines for line in kept)


@quick
@given(heads(of=CLOCKS + LANES + BLOCKS), ACTIONS)
def test_head_stable(template: list[str], actions: list[tuple[int, str, int]]) -> None:
    stabiliser, lanes, tick = warmed(template), [Lane(i) for i in range(3)], 0
    seen: dict[str, str] = {}
    for who, action, step in actions:
        tick += step
        _, done = turn(stabiliser, template, lanes[who], action, tick)
        lanes[who].last = done
        assert seen.setdefault(done.family, head_text(done.prompt)) == head_text(done.prompt)


@quick
@given(heads(of=CLOCKS + LANES), ACTIONS)
def test_append_only_in_every_lane(template: list[str], actions: list[tuple[int, str, int]]) -> None:
    named = [*template, "Lane: {lane}"] if "Lane: {lane}" not in template else template
    stabiliser, lanes, tick = warmed(named), [Lane(i) for i in range(3)], 0
    for who, action, step in actions:
        tick += step
        lane, before = lanes[who], lanes[who].last
        _, done = turn(stabiliser, named, lane, action, tick)
        if before is not None:
            answered = rendered(before.prompt) + answer_bytes({"role": "assistant", "content": lane.answer})
            assert rendered(done.prompt).startswith(answered)
        lane.last = done
        others = {f"Lane: {i}" for i in range(3) if i != who}
        assert not any(other in text.text for other in others for m in done.prompt.messages for text in m.texts)


@quick
@given(heads(of=CLOCKS + LANES + BLOCKS, examples=True), ACTIONS)
def test_idempotent_deterministic_and_the_same_as_its_preview(
    template: list[str], actions: list[tuple[int, str, int]]
) -> None:
    one, two = Stabiliser(RULES), Stabiliser(RULES)
    lanes, tick = [Lane(i) for i in range(3)], 0
    for number, (who, action, step) in enumerate(actions):
        tick += step
        lane = lanes[who]
        taken(lane, action)
        prompt = parsed(body_of(filled(template, lane.name, tick), [*lane.history]))
        seen = one.preview(prompt, float(tick))
        lane.last = one.apply(prompt, float(tick), request_id=str(number))
        assert seen == lane.last == two.apply(prompt, float(tick), request_id=str(number))
        again = one.preview(lane.last.prompt, float(tick))
        assert again.edits == ()
    assert one.export() == two.export()


@quick
@given(heads(of=CLOCKS + LANES, examples=True), ACTIONS, st.integers(0, 11))
def test_a_restart_anywhere_changes_nothing(
    template: list[str], actions: list[tuple[int, str, int]], restart_at: int
) -> None:
    steady, restarted = Stabiliser(RULES), Stabiliser(RULES)
    lanes, tick = [Lane(i) for i in range(3)], 0
    for number, (who, action, step) in enumerate(actions):
        if number == restart_at:
            state = json.loads(json.dumps(restarted.export()))
            restarted = Stabiliser(RULES)
            assert restarted.load(state) == []
        tick += step
        lane = lanes[who]
        taken(lane, action)
        prompt = parsed(body_of(filled(template, lane.name, tick), [*lane.history]))
        lane.last = steady.apply(prompt, float(tick))
        assert restarted.apply(prompt, float(tick)) == lane.last


@quick
@given(heads(of=CLOCKS + LANES + BLOCKS), ACTIONS, st.sets(st.integers(0, 11)))
def test_requests_never_sent_are_evidence_and_nothing_more(
    template: list[str], actions: list[tuple[int, str, int]], dropped: set[int]
) -> None:
    with_them, without = warmed(template), warmed(template)
    lanes, tick = [Lane(i) for i in range(3)], 0
    for number, (who, action, step) in enumerate(actions):
        tick += step
        lane = lanes[who]
        if number in dropped:
            ghost = parsed(body_of(filled(template, 3, tick), [*lane.history, "u:Ghost"]))
            with_them.apply(ghost, float(tick), request_id="ghost")
            with_them.forget_request("ghost")
            without.observe(ghost, float(tick))
        taken(lane, action)
        prompt = parsed(body_of(filled(template, lane.name, tick), [*lane.history]))
        lane.last = without.apply(prompt, float(tick))
        assert with_them.apply(prompt, float(tick)) == lane.last


@quick
@given(st.lists(st.tuples(heads(of=CLOCKS + LANES), st.integers(0, 99)), max_size=30))
def test_bounded(requests: list[tuple[list[str], int]]) -> None:
    policy = StabilisePolicy(max_conversations=4, max_families=3, max_bytes=3_000)
    stabiliser = Stabiliser(RULES, policy)
    for template, tick in requests:
        stabiliser.apply(parsed(body_of(filled(template, tick % 5, tick), [f"u:{tick}"])), float(tick))
    state = stabiliser.export()
    assert len(state["families"]) <= 3
    assert len(state["conversations"]) <= 4
    assert len(json.dumps(state["conversations"])) <= 6 * policy.max_bytes


PIECES = [
    "current", "time", "date", "is", ":", "now", "today", "10:00", "2026-03-14", "10:00:01.5", "Z", "(", ")", "[", "]",
    "Lane", "session", "id", "=", "3 of 5", "|", "-", "#", "<env>", "</env>", "<a b='c'>", "```", '"""', ">", "March",
    "14", ",", ".", " ", "  ", "\n", "\n\n", "User:", "Example:", "gitStatus: This is the git status", "é", "年", "月",
    "日", "\ud800", "\u2028", "\r\n", "x-anthropic-billing-header: a=b;", "aaaaaaaaaaaaaaaaaaaa", "99999999999999",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(PIECES), max_size=60).map(" ".join) | st.lists(st.sampled_from(PIECES)).map("".join)


@settings(quick, max_examples=300)
@given(TEXTS, TEXTS, TEXTS)
def test_any_text_at_all_is_read_and_stays_lossless(first: str, second: str, user: str) -> None:
    stabiliser = Stabiliser(RULES)
    for text in (first, second, first):
        prompt = parsed(body_of(text, [{"role": "user", "content": user}]))
        done = stabiliser.apply(prompt, 0.0)
        whole = "\n".join(t.text for m in done.prompt.messages for t in m.texts)
        stripped = {r.rule for r in done.relocations} & {rule.name for rule in RULES.strips}
        if not stripped:
            assert all(word in whole for word in text.split())
        if not done.relocations:
            assert done.edits == ()
        assert stabiliser.preview(done.prompt, 0.0).edits == ()


WORDS = (
    "maps sheet 14 2024-03-01 10:41 UTC the reads never v1.2.3 8080 {} [x] time: date lane s-1 uuid 5e0c1f3a".split()
)


def random_body(random: Random, pool: list[str]) -> bytes:
    def text(most: int) -> str:
        lines = random.choices(pool, k=random.randint(1, most))
        return random.choice(["\n", "\n\n", "\r\n"]).join(lines)

    messages: list[dict[str, Any]] = [{"role": "system", "content": text(12)}]
    roles = random.choices(["user", "assistant", "tool"], k=random.randint(0, 3))
    messages += [{"role": role, "content": text(3)} for role in roles]
    return json.dumps(
        {"messages": messages, "temperature": 0.10, "seed": 2**70}, indent=random.choice([None, 1])
    ).encode()


def test_ten_thousand_random_prompts_that_match_no_rule_come_out_byte_for_byte() -> None:
    random, stabiliser, unmatched = Random(20_260_314), Stabiliser(RULES), 0
    pool = [" ".join(random.choices(WORDS, k=random.randint(0, 9))) for _ in range(1_000)]
    for number in range(10_000):
        body = Body.parse(random_body(random, pool))
        prompt = parse_prompt(Api.CHAT, body)
        assert prompt is not None
        done = stabiliser.apply(prompt, float(number))
        if not done.relocations:
            unmatched += 1
            assert body.render(done.edits) is body.raw
    assert unmatched > 9_000
