"""What must outlive a restart, as JSON: the notes of conversations, the evidence of families, suggested rules.

An entry that does not fit is left out, on either way: state is a help, never a reason not to start.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from prefixproxy.conversations import Conversation, Conversations, Lane, Note, Step
from prefixproxy.evidence import Evidence
from prefixproxy.stabilise.learn import Learner

FORMAT = 1

State = dict[str, Any]
Refused = tuple[str, str]
"""The part and the name of an entry."""


def export_state(evidence: Evidence, conversations: Conversations, learner: Learner) -> State:
    """Everything, each part the least recently used first."""
    return {
        "format": FORMAT,
        "families": {key.hex(): evidence.export(key) for key in evidence.keys()},
        "conversations": _entries(conversations, (c.id for c in conversations.values())),
        "suggestions": _suggestions(learner, learner.names()),
    }


def export_changes(evidence: Evidence, conversations: Conversations, learner: Learner) -> State:
    """What changed since the last call, None for entries that are gone. To be laid over what was kept before."""
    families, ids, names = sorted(evidence.fresh), sorted(conversations.fresh), sorted(learner.fresh)
    for owner in (evidence, conversations, learner):
        owner.fresh.clear()
    return {
        "format": FORMAT,
        "families": {key.hex(): evidence.export(key) for key in families},
        "conversations": _entries(conversations, ids),
        "suggestions": _suggestions(learner, names),
    }


def load_state(
    state: Mapping[str, Any], evidence: Evidence, conversations: Conversations, learner: Learner
) -> list[Refused]:
    """Take exported state back. Returns which entries did not fit: of another format, all."""
    wrong: list[Refused] = []
    if state.get("format") != FORMAT:
        return [(part, key) for part in ("families", "conversations", "suggestions") for key, _ in _items(state, part)]
    for key, entry in _items(state, "families"):
        try:
            evidence.load(bytes.fromhex(key), entry)
        except (KeyError, TypeError, ValueError):
            wrong.append(("families", key))
    loaded = []
    for ident, entry in _items(state, "conversations"):
        try:
            loaded.append(_conversation(ident, entry))
        except (KeyError, TypeError, ValueError, IndexError):
            wrong.append(("conversations", ident))
    for conversation in sorted(loaded, key=lambda c: c.serial):
        conversations.load(conversation)
    for name, entry in _items(state, "suggestions"):
        try:
            learner.load(name, entry)
        except (KeyError, TypeError, ValueError):
            wrong.append(("suggestions", name))
    for owner in (evidence, conversations, learner):
        owner.fresh.clear()
    return wrong


def _items(state: Mapping[str, Any], key: str) -> list[tuple[str, Any]]:
    part = state.get(key)
    return [(k, v) for k, v in part.items() if isinstance(k, str)] if isinstance(part, dict) else []


def _entries(conversations: Conversations, ids: Iterable[bytes]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for ident in ids:
        conversation = conversations.get(ident)
        entry = _entry(conversation) if conversation else None
        if entry is None or _is_unicode(str(entry)):
            out[ident.hex()] = entry
    return out


def _suggestions(learner: Learner, names: Iterable[str]) -> dict[str, Any]:
    entries = {name: learner.export(name) for name in names}
    return {name: entry for name, entry in entries.items() if entry is None or _is_unicode(str(entry))}


def _is_unicode(text: str) -> bool:
    """Lone surrogates have no place in a JSON file."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _entry(c: Conversation) -> dict[str, Any]:
    return {
        "label": c.label,
        "serial": c.serial,
        "hint": c.lane.hint,
        "client": c.lane.client,
        "strict": [list(pair) for pair in c.lane.strict],
        "weak": [list(pair) for pair in c.lane.weak],
        "fields": [[number, value.hex()] for number, value in c.lane.fields],
        "steps": [_step_row(step) for step in c.steps],
        "notes": [list(note) for note in c.notes],
    }


def _step_row(step: Step) -> list[Any]:
    large = [list(pair) for pair in step.large]
    kept = [[number, value.hex()] for number, value in step.kept]
    return [step.key.hex(), step.newest, step.notes, large, step.prefill, step.answer.hex(), step.ids.hex(), kept]


def _conversation(ident: str, entry: dict[str, Any]) -> Conversation:
    lane = Lane(
        hint=str(entry["hint"]),
        strict=tuple((str(a), str(b)) for a, b in entry["strict"]),
        weak=tuple((str(a), str(b)) for a, b in entry["weak"]),
        fields=tuple((int(number), bytes.fromhex(value)) for number, value in entry["fields"]),
        client=str(entry.get("client", "")),
    )
    notes = tuple(Note(int(at), int(number), str(text)) for at, number, text in entry["notes"])
    steps = tuple(
        Step(
            key=bytes.fromhex(key),
            newest=int(newest),
            notes=int(n_notes),
            large=tuple((int(f), str(t)) for f, t in large),
            prefill=bool(prefill),
            answer=bytes.fromhex(answer),
            ids=bytes.fromhex(more[0]) if more else b"",
            kept=tuple((int(f), bytes.fromhex(value)) for f, value in more[1]) if len(more) > 1 else (),
        )
        for key, newest, n_notes, large, prefill, answer, *more in entry["steps"]
    )
    if not steps or any(not 0 <= step.notes <= len(notes) for step in steps):
        raise ValueError("steps and notes do not fit")
    return Conversation(bytes.fromhex(ident), str(entry["label"]), lane, steps, notes, int(entry["serial"]))
