"""The edits that take spans out of a head and put notes behind messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import compress

from prefixproxy.conversations import HEAD_END
from prefixproxy.prompt import Edit, Message, Prompt, Remove, SetText
from prefixproxy.stabilise.notes import note_edit, note_text
from prefixproxy.types import Relocation
from prefixproxy.volatile.head import HeadText, HeadView, by_text, head_text, masked


def edits_of(
    prompt: Prompt, view: HeadView, cut: Sequence[bool], notes: Mapping[int, Sequence[str]]
) -> tuple[Edit, ...]:
    """One edit for each text of the head that changes, and one for each message that takes a note."""
    head = prompt.head
    new = _new_texts(view, cut)
    at_end = list(notes.get(HEAD_END, ()))
    edits: list[Edit] = []
    told: dict[int, list[tuple[HeadText, str]]] = {}
    for text, left in zip(view.texts, new, strict=True):
        told.setdefault(text.message, []).append((text, left))
    for number, message in enumerate(head):
        closing = at_end if number == len(head) - 1 else []
        edits += _message_edits(message, told.get(number, ()), closing)
    for at, texts in sorted(notes.items()):
        if at != HEAD_END:
            edits.append(note_edit(prompt.messages[len(head) + at], texts))
    return tuple(edits)


def emptied(view: HeadView, cut: Sequence[bool]) -> bool:
    """Whether nothing but white space would be left of the head's texts."""
    return not any(text.strip() for text in _new_texts(view, cut))


def relocations_of(prompt: Prompt, view: HeadView, cut: Sequence[bool]) -> tuple[Relocation, ...]:
    """What was stripped and cut, in the order of the head."""
    out, leaving = [], by_text(list(compress(view.spans, cut)))
    for number, text in enumerate(view.texts):
        if not text.stripped and number not in leaving:
            continue
        segment = f"{prompt.messages[text.message].role.value}[{text.message}]"
        out += [Relocation(rule.name, segment, _n_bytes(line.rstrip("\r\n"))) for rule, line in text.stripped]
        out += [Relocation(span.rule.name, segment, _n_bytes(span.note)) for span in leaving.get(number, ())]
    return tuple(out)


def masked_texts(prompt: Prompt, view: HeadView) -> list[tuple[str, str]]:
    """The head's texts by segment, with each span replaced by its rule's name."""
    out, spans = [], by_text(view.spans)
    for number, text in enumerate(view.texts):
        segment = f"{prompt.messages[text.message].role.value}[{text.message}]"
        out.append((segment, masked(text.text, spans.get(number, ()))))
    return out


def _n_bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def _new_texts(view: HeadView, cut: Sequence[bool]) -> list[str]:
    gone = by_text(list(compress(view.spans, cut)))
    return [head_text(text, gone.get(number, ())) for number, text in enumerate(view.texts)]


def _message_edits(message: Message, texts: Sequence[tuple[HeadText, str]], closing: Sequence[str]) -> Iterator[Edit]:
    changed = [(t, new) for t, new in texts if new != t.part.text]
    if not closing and changed and _is_emptied(message, texts):
        yield Remove(message.path)
        return
    for text, new in changed:
        last = text is texts[-1][0]
        if new.strip() or (last and closing) or message.form == "string":
            yield SetText(text.part.path, new + (note_text(closing) if last and closing else ""))
        else:
            yield Remove(text.part.path[: len(message.content_path) + 1])
    if closing and not any(text is texts[-1][0] for text, _ in changed):
        yield note_edit(message, closing)


def _is_emptied(message: Message, texts: Sequence[tuple[HeadText, str]]) -> bool:
    return len(texts) == len(message.parts) and not any(new.strip() for _, new in texts)
