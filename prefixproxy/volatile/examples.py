"""Runs the example of a rule: the head `before` must become `after`, by this rule alone or with others in force."""

from __future__ import annotations

from prefixproxy.prompt import Message, Role, Text
from prefixproxy.volatile.head import HeadReader, HeadView, by_text, cut_flags, head_text
from prefixproxy.volatile.rules import Example, Rule, RuleSet


def failure(rule: Rule, rules: RuleSet) -> str:
    """What is wrong with the rule's example, as a clause; "" if nothing is, or if it has none. It may come out by the
    rule alone, or with the help of the other `rules`."""
    example = rule.example
    if example is None:
        return ""
    alone = _failure(rule, example, RuleSet((rule,), rules.companions))
    return alone and _failure(rule, example, rules) and alone


def _failure(rule: Rule, example: Example, rules: RuleSet) -> str:
    reader = HeadReader(rules)
    view = reader.read(_head(example.before))
    changed = [False] * len(view.spans)
    if example.earlier:
        earlier = reader.read(_head(example.earlier))
        if earlier.key != view.key or len(earlier.spans) != len(view.spans):
            return "`earlier` and `before` differ in more than what this rule finds in them"
        changed = [a.note != b.note for a, b in zip(earlier.spans, view.spans, strict=True)]
    cut = cut_flags(view, changed)
    acted = {view.spans[i].rule.name for i in range(len(cut)) if cut[i]} | {r.name for r, _ in view.texts[0].stripped}
    return _differs(example, view, cut) or ("" if rule.name in acted else "it comes out without this rule")


def _differs(example: Example, view: HeadView, cut: list[bool]) -> str:
    gone = [span for span, leaves in zip(view.spans, cut, strict=True) if leaves]
    left = head_text(view.texts[0], by_text(gone).get(0, ()))
    if left != example.after:
        hint = "" if view.spans else "; the rule finds nothing in `before`"
        hint = hint or ("" if gone else "; the rule waits for `earlier`, the same head with another value")
        return f"`before` becomes {_short(left)}, not `after` ({_short(example.after)}){hint}"
    note = "\n".join(span.note for span in gone)
    if example.note and note != example.note:
        return f"the note is {_short(note)}, not {_short(example.note)}"
    return ""


def _head(text: str) -> tuple[Message, ...]:
    path = ("messages", 0, "content")
    return (Message(Role.SYSTEM, path[:2], (Text(path, text),), "string", path),)


def _short(text: str) -> str:
    shown = ascii(text)
    return shown if len(shown) <= 80 else shown[:77] + "..."
