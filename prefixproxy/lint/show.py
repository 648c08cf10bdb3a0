"""What `lint` shows: blocks of text at 80 columns, or one JSON object with the keys of docs/howto/lint.md."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.text import Text

from prefixproxy import __version__
from prefixproxy.lint.compare import MEANING, Comparison, Difference, shown
from prefixproxy.lint.report import Checked, Pair, Report
from prefixproxy.lint.rules import Sighting, When
from prefixproxy.stabilise.learn import Suggestion

MAX_BLOCKS, MAX_MODEL = 20, 60
"""Pairs that are shown in full; the rest have a line each, and everything in the JSON."""
MAX_RULES_SHOWN = 8
LABEL_WIDTH = 12
WORTH_SAYING = 32
"""Tokens that two different prompts have in common behind their first difference (tools, mostly)."""
END = "(the text ends here)"

_WHEN = {
    When.FIRST_SIGHT: "at first sight",
    When.SEEN_TO_CHANGE: "once it was seen to change",
    When.WAITING: "not yet: seen with one value only",
}
_GOOD, _BAD, _DIM, _NAME = "green", "bold red", "dim", "cyan"


def as_json(report: Report) -> dict[str, Any]:
    """The report; token counts are estimates, positions count from 1 except offsets, which are bytes from 0."""
    setup = report.setup
    return {
        "version": __version__,
        "ok": report.ok,
        "settings": {"mode": setup.mode, "learned": setup.policy.learned, "rules": len(setup.rules.rules)},
        "tokens": {"estimated": True, "by": report.tokenizer, "note": report.note or None},
        "summary": _summary(report),
        "requests": [_request_json(request) for request in report.requests],
        "pairs": [_pair_json(pair) for pair in report.pairs],
        "suggestions": [_suggestion_json(report, one) for one in report.suggestions],
    }


def _summary(report: Report) -> dict[str, int]:
    judged = [pair for pair in report.pairs if pair.nearest]
    return {
        "requests": len(report.requests),
        "left_out": report.left_out,
        "pairs": len(report.pairs),
        "breaks_as_sent": sum(pair.sent.breaks for pair in judged),
        "breaks_stabilised": sum(pair.stabilised.breaks for pair in judged),
        "breaks_settled": sum(pair.settled.breaks for pair in judged),
        "lost_as_sent": sum(_lost(pair.sent) for pair in judged),
        "lost_stabilised": sum(_lost(pair.stabilised) for pair in judged),
        "lost_settled": sum(_lost(pair.settled) for pair in judged),
    }


def _lost(comparison: Comparison) -> int:
    return comparison.lost if comparison.breaks else 0


def _request_json(request: Checked) -> dict[str, Any]:
    sample = request.sample
    return {
        "number": sample.number,
        "source": shown(sample.source),
        "place": sample.place,
        "api": sample.api.value,
        "api_guessed": sample.guessed,
        "model": shown(sample.prompt.model),
        "prompt_bytes": request.sent.n_bytes,
        "prompt_tokens": request.tokens,
        "head_tokens": request.head_tokens,
        "family": request.live.family,
        "rules": [_sighting_json(one) for one in request.seen],
        "tools_restored": request.live.tools_restored,
        "calls_restored": request.live.calls_restored,
        "suggestions": list(request.taught),
    }


def _sighting_json(one: Sighting) -> dict[str, Any]:
    values = asdict(one)
    values["bytes"] = values.pop("n_bytes")
    values["when"] = one.when.value
    return values


def _pair_json(pair: Pair) -> dict[str, Any]:
    return {
        "earlier": pair.earlier,
        "later": pair.later,
        "previous": pair.previous,
        "nearest": pair.nearest,
        "still_breaks": pair.still_breaks,
        "tools": pair.tools or None,
        "sent": _comparison_json(pair.sent),
        "stabilised": _comparison_json(pair.stabilised),
        "settled": _comparison_json(pair.settled),
        "with_suggestions": None if pair.suggested is None else _comparison_json(pair.suggested),
    }


def _comparison_json(one: Comparison) -> dict[str, Any]:
    return {
        "verdict": one.verdict.value,
        "kept_tokens": one.kept,
        "behind_tokens": one.behind,
        "lost_tokens": one.lost,
        "first_difference": None if one.difference is None else asdict(one.difference),
    }


def _suggestion_json(report: Report, one: Suggestion) -> dict[str, Any]:
    taught = [request.sample.number for request in report.requests if one.name in request.taught]
    return {"name": one.name, "values": one.values, "requests": taught, "toml": one.toml}


def print_report(report: Report, console: Console) -> None:
    """The report as text, for people."""
    for line in _opening(report):
        _print(console, Text(line))
    by_number = {request.sample.number: request for request in report.requests}
    if not report.pairs:
        for request in report.requests[:MAX_BLOCKS]:
            console.print()
            _print(console, Text(f"Request {_named(request)}: nothing before it to compare it with", style="bold"))
            _print_rows(console, _rule_rows(request))
    interesting = [pair for pair in report.pairs if _is_interesting(pair, by_number[pair.later])]
    full = {id(pair) for pair in interesting[:MAX_BLOCKS]}
    for pair in report.pairs:
        earlier, later = by_number[pair.earlier], by_number[pair.later]
        console.print()
        _print(console, Text(f"Request {_named(later)} after {_named(earlier, later)}", style="bold"))
        _print_rows(console, _pair_rows(pair, later) if id(pair) in full else [("Stabilised", _outcome(pair))])
    _print_suggestions(report, console)
    console.print()
    _print(console, _closing(report))


def _called(model: str) -> str:
    return shown(model if len(model) <= MAX_MODEL else f"{model[: MAX_MODEL - 3]}...") or "(no model)"


def _opening(report: Report) -> Iterator[str]:
    asked = {request.sample.prompt.model for request in report.requests}
    models = sorted(map(_called, asked))
    n = len(report.requests)
    yield f"{n} request{'s' * (n != 1)}, model {', '.join(models[:5])}{', ...' if len(models) > 5 else ''}."
    if len(models) > 1:
        yield "Only requests of the same model are compared."
    yield f"Token counts are estimated ({report.tokenizer}); the model's own may differ."
    if report.note:
        yield f"Note: {report.note}."
    if report.left_out:
        n = report.left_out
        yield f"Note: {n} journal record{'s' * (n != 1)} without prompt text {'is' if n == 1 else 'are'} left out."
    if report.setup.mode != "apply":
        yield f'Note: stabilise.mode is "{report.setup.mode}", so the proxy changes nothing.'


def _named(request: Checked, other: Checked | None = None) -> str:
    """Number, file, place and API; the file is not said again where it is that of `other`."""
    sample = request.sample
    same = other is not None and other.sample.source == sample.source
    where = [sample.place if same else f"{shown(sample.source)} {sample.place}".rstrip(), sample.api.value]
    return f"{sample.number} ({', '.join(word for word in where if word)})"


def _is_interesting(pair: Pair, later: Checked) -> bool:
    quiet = pair.sent.difference is None and pair.settled.difference is None
    return not quiet or bool(later.seen) or later.live.tools_restored or bool(later.live.calls_restored)


def _print_rows(console: Console, rows: Iterable[tuple[str, Text]]) -> None:
    for label, content in rows:
        _print(console, content, f"  {label:<{LABEL_WIDTH}}")


def _print(console: Console, text: Text, label: str = "") -> None:
    """Wrapped to the console, later lines under the first one; no line ends in spaces, and none is cut."""
    width = max(20, console.width - len(label))
    for number, line in enumerate(text.wrap(console, width)):
        whole = Text(label if number == 0 else " " * len(label), style=_DIM).append_text(line)
        whole.rstrip()
        console.print(whole, soft_wrap=True)


def _pair_rows(pair: Pair, later: Checked) -> Iterator[tuple[str, Text]]:
    yield "As sent", _state(pair.sent, pair.tools)
    if pair.sent.difference is not None:
        yield "", _excerpts(pair.sent.difference)
    yield from _rule_rows(later)
    yield "Stabilised", _outcome(pair)
    if pair.still_breaks and pair.settled.difference is not None and pair.settled.difference != pair.sent.difference:
        yield "", _excerpts(pair.settled.difference)
    if pair.still_breaks:
        yield "Why", Text(_why(pair, later))


def _state(one: Comparison, tools: str) -> Text:
    total = one.kept + one.behind
    if one.difference is None:
        return Text(f"{MEANING[one.verdict]}: {one.kept} of {total} prompt tokens are kept", style=_GOOD)
    text = Text()
    text.append("the prefix breaks" if one.breaks else "first difference", style=_BAD if one.breaks else "default")
    text.append(f" at {place(one.difference)}")
    if tools and one.difference.segment == "tools":
        text.append(f" ({tools})")
    text.append(f". {one.kept} of {total} prompt tokens are kept")
    if one.breaks:
        text.append(f"; of the {one.behind} behind it {one.lost} stand in both prompts and are lost.")
    else:
        text.append(f": {MEANING[one.verdict]}")
        text.append(f", with {one.lost} tokens behind it that stand in both." if one.lost >= WORTH_SAYING else ".")
    return text


def place(difference: Difference) -> str:
    """Where a difference is, in words."""
    part = f" part {difference.part}" if difference.part > 1 else ""
    where = f", line {difference.line}, column {difference.column}" if difference.line else ""
    return f"{difference.segment}{part}{where} (byte {difference.offset} of the segment)"


def _excerpts(difference: Difference) -> Text:
    text = Text()
    for label, own in (("earlier  ", difference.earlier), ("later    ", difference.later)):
        text.append(label, style=_DIM)
        text.append(difference.same)
        text.append(own, style=_BAD) if own else text.append(END, style=_DIM)
        text.append("\n")
    return text.append(" " * (len("earlier  ") + len(difference.same)) + "^")


def _rule_rows(later: Checked) -> Iterator[tuple[str, Text]]:
    seen = [one for one in later.seen if one.acted] + [one for one in later.seen if not one.acted]
    for number, one in enumerate(seen[:MAX_RULES_SHOWN]):
        yield "" if number else "Rules", _rule_line(one)
    if len(seen) > MAX_RULES_SHOWN:
        yield "", Text(f"and {len(seen) - MAX_RULES_SHOWN} more (--json has all)", style=_DIM)
    if later.live.tools_restored:
        yield "Tools", Text("sent in the order and spelling first seen")
    if later.live.calls_restored:
        calls = f"{later.live.calls_restored} tool call{'s' * (later.live.calls_restored != 1)}"
        yield "Answers", Text(f"{calls} put back as the server spelled them (taken to be the first spelling seen here)")


def _rule_line(one: Sighting) -> Text:
    text = Text()
    text.append(one.rule, style=_NAME)
    does = {"strip": ("strips", "would strip"), "move": ("moves", "would move")}[one.treatment][not one.acted]
    part = f" part {one.part}" if one.part > 1 else ""
    text.append(f" {does} {one.segment}{part} line {one.line}, {_WHEN[one.when]}:\n")
    return text.append(one.text, style=_DIM)


def _outcome(pair: Pair) -> Text:
    now, later = pair.stabilised, pair.settled
    total = now.kept + now.behind
    if not now.breaks:
        return Text(f"{now.kept} of {total} tokens kept, nothing is lost: {MEANING[now.verdict]}", style=_GOOD)
    if not later.breaks:
        text = Text(f"once {now.lost} of {total} tokens lost, then none", style="yellow")
        text.append(": this request shows that the text changes; from now on its head stays the same.", style="default")
        return text
    if not pair.nearest:
        return Text(f"{now.lost} of {total} tokens lost against this one; a nearer request is compared as well")
    text = Text(f"still breaks: {later.lost} of {later.kept + later.behind} tokens lost", style=_BAD)
    return text.append(f" at {place(later.difference)}" if later.difference else "", style="default")


def _why(pair: Pair, later: Checked) -> str:
    assert pair.settled.difference is not None
    segment = pair.settled.difference.segment
    if segment == "tools" and pair.tools:
        return f"{pair.tools}. Tools that differ in meaning are sent as they are."
    if later.taught:
        helped = pair.suggested
        effect = f" With it, {helped.kept} of {helped.kept + helped.behind} tokens are kept." if helped else ""
        return f"text changes that no rule knows. A rule is suggested below: {', '.join(later.taught)}.{effect}"
    if segment.startswith(("system", "developer")):
        return "the words of the head changed, and do not look like state. They are left as they are."
    return "the conversation itself was changed by the client. Only the head is ever edited."


def _print_suggestions(report: Report, console: Console) -> None:
    for one in report.suggestions:
        console.print()
        said = (
            "Suggested rule, not applied. If this text is state and no content, put the rule into a file and name that "
            "in stabilise.rules (or try it here with --rules):"
        )
        _print(console, Text(said))
        console.print(Text(one.toml.rstrip()), soft_wrap=True)


def _closing(report: Report) -> Text:
    sums = _summary(report)
    if not report.pairs:
        return Text("Nothing to compare: lint needs two requests of one model.")
    lost = f"tokens lost as sent {sums['lost_as_sent']}, stabilised {sums['lost_stabilised']}"
    if sums["lost_stabilised"] != sums["lost_settled"]:
        lost += f", once settled {sums['lost_settled']}"
    if report.ok:
        text = Text("Nothing breaks the cache after stabilising", style=_GOOD)
    else:
        text = Text(f"{sums['breaks_settled']} of {len(report.requests)} requests still break the cache", style=_BAD)
    return text.append(f" ({lost}; estimated).", style="default")
