"""What must hold of every client's run through the proxy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from acted_engine import Asked, prompt_of, rendered
from running import Run, Sent

from prefixproxy.prompt import Message, Prompt, Role, Text

CONTROL = frozenset({"id_slot", "stream", "stream_options", "return_progress", "timings_per_token", "cache_prompt"})
PROMPT = frozenset({"messages", "input", "instructions", "system", "tools"})
BILLING = "x-anthropic-billing-header:"
"""What the one rule strips that declares it to be no prompt text."""


def extended(prompts: Sequence[bytes]) -> list[tuple[int, int]]:
    """For each prompt that begins with a whole earlier one: the longest such, and itself."""
    pairs = []
    for j, prompt in enumerate(prompts):
        earlier = [i for i in range(j) if len(prompts[i]) < len(prompt) and prompt.startswith(prompts[i])]
        if earlier:
            pairs.append((max(earlier, key=lambda i: len(prompts[i])), j))
    return pairs


def check_prefixes(run: Run, appended: int, mended: int) -> None:
    """Where the client only appended, what went upstream is a byte prefix of the next, too."""
    forwarded = by_number(run)
    numbers = sorted(forwarded)
    before = [rendered(run.sent[n].api, run.sent[n].body) for n in numbers]
    after = [forwarded[n].rendered for n in numbers]
    pairs = extended(before)
    for i, j in pairs:
        assert after[j].startswith(after[i]), f"request {numbers[j]} no longer begins with request {numbers[i]}"
    assert len(pairs) >= appended, pairs
    assert len(extended(after)) >= mended, extended(after)


def by_number(run: Run) -> dict[int, Asked]:
    """The prompts of a run through the proxy, each once: none was lost, none sent twice."""
    numbers = [each.number for each in run.asked]
    assert sorted(n for n in numbers if n is not None) == sorted(run.sent)
    return {each.number: each for each in run.asked if each.number is not None}


def check_nothing_lost(sent: Sent, forwarded: Asked) -> None:
    """Answers, results and tools as they were; user texts with at most a note behind them; every word of the head in
    the head or in a note; all other keys of the body equal."""
    before, after = prompt_of(sent.api, sent.body), forwarded.prompt
    assert before.data is not None
    assert after.data is not None
    rest = [{k: v for k, v in p.data.items() if k not in CONTROL | PROMPT} for p in (before, after) if p.data]
    assert rest[0] == rest[1]
    assert sorted(t.canonical for t in before.tools) == sorted(t.canonical for t in after.tools)
    tails = [p.messages[len(p.head) :] for p in (before, after)]
    for ours, theirs in zip(*tails, strict=True):
        assert ours.role is theirs.role
        _check_message(ours, theirs)
    _check_head(before, after)


def _check_message(before: Message, after: Message) -> None:
    if before.role is not Role.USER:
        return _check_same(before, after)
    texts = [[text.text for text in message.texts] for message in (before, after)]
    assert "\n".join(texts[1]).startswith("\n".join(texts[0]))


def _check_same(before: Message, after: Message) -> None:
    """An empty text counts as none: who waits long on `/v1/messages` gets one as a sign of life, and sends it back."""
    parts = [[part for part in m.parts if not isinstance(part, Text) or part.text] for m in (before, after)]
    texts = [[part.text for part in each if isinstance(part, Text)] for each in parts]
    assert texts[0] == texts[1]
    assert len(parts[0]) == len(parts[1])


def _check_head(before: Prompt, after: Prompt) -> None:
    """Every word as often as before, in the head or in a note."""
    words = [Counter(_words(prompt)) for prompt in (before, after)]
    assert not words[0] - words[1]


def _words(prompt: Prompt) -> Iterator[str]:
    for message in prompt.messages:
        for line in (line for text in message.texts for line in text.text.splitlines()):
            if not line.startswith(BILLING):
                yield from line.split()
