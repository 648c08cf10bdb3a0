"""Makes a prompt the same from turn to turn: what is volatile in its head becomes notes behind the conversation.

Only the head is ever cut, by rules. What was cut is appended to a user message, and the same bytes are written there
again each time the client resends its history. `apply` decides and remembers, `preview` only decides.
"""

from __future__ import annotations

import tomllib
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal

from prefixproxy.chat import apply_edits, message_digest
from prefixproxy.conversations import HEAD_END, Change, Conversations, Place, kept_now, told
from prefixproxy.evidence import Evidence, value_digest
from prefixproxy.prompt import Edit, Message, Prompt
from prefixproxy.stabilise.edits import edits_of, emptied, masked_texts, relocations_of
from prefixproxy.stabilise.history import Notes, history_of, noted
from prefixproxy.stabilise.learn import Learner, Suggestion
from prefixproxy.stabilise.notes import is_small
from prefixproxy.stabilise.state import Refused, export_changes, export_state, load_state
from prefixproxy.types import Relocation
from prefixproxy.volatile.files import builtin_fragments, read_rule
from prefixproxy.volatile.head import HeadReader, HeadView, cut_flags
from prefixproxy.volatile.rules import Rule, RuleSet

Learned = Literal["apply", "suggest", "off"]

MAX_PENDING = 4096
"""Requests whose memory can still be taken back; beyond them, the oldest count as sent."""


@dataclass(frozen=True, slots=True)
class StabilisePolicy:
    """`learned`: what becomes of text that changes though no rule knows it. Notes of more than `replay_limit_tokens`
    stand in the newest user message only. The other three bound the memory."""

    learned: Learned = "suggest"
    replay_limit_tokens: int = 64
    max_conversations: int = 4096
    max_families: int = 1024
    max_bytes: int = 32 << 20


@dataclass(frozen=True, slots=True)
class Stabilised:
    """A prompt as it is to be sent. `edits` lead there from the client's body; `relocations` are what was cut or
    stripped. `family` (16 hex digits) stands for the head with its volatile spans masked and the tools, `conversation`
    for what the request goes on with. `notes` are the texts told in this request, replayed ones included.
    `undecided`: the head holds text that would move, had its family been seen with another value of it."""

    prompt: Prompt
    edits: tuple[Edit, ...]
    relocations: tuple[Relocation, ...]
    family: str
    conversation: str
    notes: tuple[str, ...] = ()
    undecided: bool = False


@dataclass(frozen=True, slots=True)
class _Decision:
    """What one prompt comes to, before anything of it is remembered."""

    view: HeadView
    values: tuple[bytes, ...]
    edits: tuple[Edit, ...]
    relocations: tuple[Relocation, ...]
    conversation: str
    notes: Notes | None
    undecided: bool


class Stabiliser:
    """Owns the notes, the evidence and the conversations. Plain calls, no I/O; `now` is in seconds, on any clock."""

    def __init__(self, rules: RuleSet, policy: StabilisePolicy | None = None) -> None:
        self._policy = policy or StabilisePolicy()
        self._rules = rules
        self._reader = HeadReader(rules)
        self._evidence = Evidence(self._policy.max_families)
        self._conversations = Conversations(self._policy.max_conversations, self._policy.max_bytes)
        self._learner = Learner()
        self._pending: OrderedDict[str, Change] = OrderedDict()

    def apply(
        self, prompt: Prompt, now: float, *, lane: str = "", client: str = "", request_id: str = ""
    ) -> Stabilised:
        """Decide, and remember. A second call for the same `request_id` replaces what the first one remembered.
        `lane` is a name that tells conversations apart; `client` one that several may share."""
        self.forget_request(request_id)
        decision = self._decide(prompt, lane, client)
        self._learn(prompt, decision.view, decision.values, now)
        if decision.notes is not None:
            change = self._conversations.put(decision.notes.conversation)
            if request_id:
                self._pending[request_id] = change
                if len(self._pending) > MAX_PENDING:
                    self._pending.popitem(last=False)
        return _answer(prompt, decision)

    def preview(self, prompt: Prompt, now: float, *, lane: str = "") -> Stabilised:
        """What `apply` would answer; nothing is remembered."""
        return _answer(prompt, self._decide(prompt, lane))

    def read_ahead(self, prompt: Prompt) -> Iterator[None]:
        """Reads a long new head in slices, and stops behind each: `observe` and `apply` are quick then. Optional."""
        return self._reader.read_ahead(prompt.head, _salt(prompt))

    def observe(self, prompt: Prompt, now: float, *, request_id: str = "") -> bool:
        """Take a request that waits as evidence. True if a span of its family is now known to change that was not:
        requests of that family that wait should be applied again."""
        view = self._view(prompt)
        return self._learn(prompt, view, _values(view), now)

    def forget_request(self, request_id: str) -> None:
        """The request was never sent, so its notes are in nobody's history."""
        change = self._pending.pop(request_id, None)
        if change is not None:
            self._conversations.undo(change)

    def answered(self, request_id: str, answer: Message) -> None:
        """What this request was answered with: two lanes that asked the same are told apart by it from here on."""
        change = self._pending.get(request_id)
        if change is not None:
            conversation = change.after
            self._conversations.answered(conversation.id, conversation.steps[-1].key, message_digest(answer))

    def suggestions(self) -> tuple[Suggestion, ...]:
        """Ready-made rules for text that was seen to change though no rule knows it, and looks like state; none where
        `learned` is "off"."""
        return self._learner.suggestions() if self._policy.learned != "off" else ()

    def export(self) -> dict[str, Any]:
        """Notes, evidence and suggested rules as JSON, to be given to `load` after a restart."""
        return export_state(self._evidence, self._conversations, self._learner)

    def changes(self) -> dict[str, Any]:
        """The part of `export` that changed since the last call: entries by key under "families", "conversations" and
        "suggestions", None for one that is gone."""
        return export_changes(self._evidence, self._conversations, self._learner)

    def load(self, state: Mapping[str, Any]) -> list[Refused]:
        """Take exported state back, beside what is known already. Returns which entries did not fit."""
        wrong = load_state(state, self._evidence, self._conversations, self._learner)
        if self._policy.learned == "apply" and self._learner.suggestions():
            self._read_with_learned()
        return wrong

    def _view(self, prompt: Prompt) -> HeadView:
        return self._reader.read(prompt.head, _salt(prompt))

    def _learn(self, prompt: Prompt, view: HeadView, values: Sequence[bytes], now: float) -> bool:
        if self._policy.learned != "off" and view.texts:
            taught = self._learner.see(view.key, _group(prompt), masked_texts(prompt, view), now)
            if taught and self._policy.learned == "apply":
                self._read_with_learned()
        return bool(view.spans) and self._evidence.learn(view.key, values)

    def _read_with_learned(self) -> None:
        self._reader = HeadReader(self._rules.with_rules(self._learned_rules()))

    def _learned_rules(self) -> list[Rule]:
        fragments = builtin_fragments()
        tables = (tomllib.loads(s.toml)["rule"][0] for s in self._learner.suggestions())
        return [read_rule(table, "learned", fragments) for table in tables]

    def _decide(self, prompt: Prompt, lane: str, client: str = "") -> _Decision:
        view = self._view(prompt)
        values = _values(view)
        history = history_of(prompt, view, values, lane, client)
        place = None
        if view.spans:
            place = self._conversations.find(history.known(), history.lane, history.heard(), history.called(), values)
        settled = kept_now(place.step, values) if place else frozenset()
        cut = cut_flags(view, self._known_to_change(view, values, place, settled))
        if history.newest == HEAD_END or emptied(view, cut):
            cut = _held_back(view, cut, empty=emptied(view, cut))
        notes = None
        if view.spans:
            texts = {i: span.note for i, span in enumerate(view.spans) if cut[i]}
            kept = [(i, value) for i, value in enumerate(values) if not cut[i]]
            notes = noted(history, place, texts, self._newest_only(view, texts), kept)
        return _Decision(
            view=view,
            values=values,
            edits=edits_of(prompt, view, cut, notes.by_message if notes else {}),
            relocations=relocations_of(prompt, view, cut),
            conversation=notes.conversation.label if notes else history.label,
            notes=notes,
            undecided=not all(c or i in settled for i, c in enumerate(cut)),
        )

    def _newest_only(self, view: HeadView, texts: Mapping[int, str]) -> set[int]:
        """The fields whose older values must not stay in the history: state, and what is too long to pile up."""
        limit = self._policy.replay_limit_tokens
        return {i for i, text in texts.items() if not (view.spans[i].rule.replay and is_small(text, limit))}

    def _known_to_change(
        self, view: HeadView, values: Sequence[bytes], place: Place | None, settled: Collection[int]
    ) -> list[bool]:
        """Spans seen to change, and those whose value this conversation was told already. The `settled` ones were sent
        in their place with this value: what others showed of them does not count."""
        changed = list(self._evidence.changed(view.key, values))
        if place is not None:
            for number in (*told(place.notes), *dict(place.step.large)):
                changed[number] = True
        return [flag and number not in settled for number, flag in enumerate(changed)]


def _salt(prompt: Prompt) -> bytes:
    return prompt.model.encode("utf-8", "surrogatepass")


def _group(prompt: Prompt) -> bytes:
    """Heads of one group may be compared: same model, same number of messages and parts."""
    shape = [(m.role.value, len(m.parts)) for m in prompt.head]
    return repr((prompt.model, shape)).encode("utf-8", "surrogatepass")


def _values(view: HeadView) -> tuple[bytes, ...]:
    return tuple(value_digest(span.note) for span in view.spans)


def _held_back(view: HeadView, cut: Sequence[bool], *, empty: bool) -> list[bool]:
    """Spans that stay: all, where nothing of the head would be left; without user messages those that close it, as
    their note would stand in the same place."""
    out = [c and not empty for c in cut]
    for i in reversed(range(len(out))):
        if not view.spans[i].closes_head:
            break
        out[i] = False
    return out


def _answer(prompt: Prompt, decision: _Decision) -> Stabilised:
    notes = decision.notes.by_message if decision.notes else {}
    return Stabilised(
        prompt=apply_edits(prompt, decision.edits),
        edits=decision.edits,
        relocations=decision.relocations,
        family=_family(decision.view, prompt),
        conversation=decision.conversation,
        notes=tuple(text for at in sorted(notes) for text in notes[at]),
        undecided=decision.undecided,
    )


def _family(view: HeadView, prompt: Prompt) -> str:
    """The head with its spans masked, and the tools in whatever order they stand."""
    state = blake2b(view.key, digest_size=8)
    for tool in sorted(tool.canonical for tool in prompt.tools):
        state.update(blake2b(tool, digest_size=8).digest())
    return state.hexdigest()
