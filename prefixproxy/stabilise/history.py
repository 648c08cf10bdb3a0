"""Which notes a request carries: those its history carried, and the new values, each in its one place."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

from prefixproxy.chat import call_ids, message_digest
from prefixproxy.conversations import (
    HEAD_END,
    Conversation,
    Lane,
    Note,
    Place,
    Step,
    extended,
    told,
)
from prefixproxy.prompt import Prompt, Role
from prefixproxy.stabilise.notes import takes_note
from prefixproxy.volatile.head import HeadView


@dataclass(frozen=True, slots=True)
class History:
    """A prompt's messages behind the head. `keys[n]` stands for the head's family and the first n of them.

    `said` are the messages' own digests, `ids[n]` stands for the tool-call ids in the first n. `first` and `newest` are
    the user messages that can take a note (HEAD_END: there is none), `answered` says whether an assistant has spoken
    before the end, `asked` how many messages stand before an assistant's text to be continued.
    """

    keys: tuple[bytes, ...]
    said: tuple[bytes, ...]
    ids: tuple[bytes, ...]
    answers: tuple[int, ...]
    first: int
    newest: int
    asked: int
    lane: Lane

    @property
    def answered(self) -> bool:
        return any(at < self.asked for at in self.answers)

    @property
    def prefill(self) -> bool:
        return self.asked < len(self.keys) - 1

    @property
    def label(self) -> str:
        """16 hex digits for the conversation: its opening, up to the first answer, and its lane."""
        opening = self.answers[0] if self.answers else len(self.keys) - 1
        state = blake2b(self.keys[opening], digest_size=8)
        state.update(repr((self.lane.hint, self.lane.strict, self.lane.weak)).encode("utf-8", "surrogatepass"))
        return state.hexdigest()

    def known(self) -> list[tuple[bytes, bool]]:
        """The hashes of the history before each answer, the longest first, and whether that answer is only begun."""
        return [(self.keys[at], at >= self.asked) for at in reversed(self.answers)]

    def heard(self) -> dict[bytes, bytes]:
        """The answers in it, by the hash of the history before each."""
        return {self.keys[at]: self.said[at] for at in self.answers}

    def called(self) -> dict[bytes, bytes]:
        """The tool-call ids before each answer, by the hash of the history before it."""
        return {self.keys[at]: self.ids[at] for at in self.answers}


@dataclass(frozen=True, slots=True)
class Notes:
    """The texts of each message's note, by its number behind the head, and the conversation with this request in it."""

    by_message: Mapping[int, tuple[str, ...]]
    conversation: Conversation


def history_of(prompt: Prompt, view: HeadView, values: Sequence[bytes], hint: str, client: str = "") -> History:
    """The prompt's history, and the lane that its head and its client tell."""
    tail = prompt.messages[len(prompt.head) :]
    keys, said = [blake2b(view.key, digest_size=16).digest()], [message_digest(message) for message in tail]
    for digest in said:
        keys.append(blake2b(keys[-1] + digest, digest_size=16).digest())
    ids = [b""]
    for message in tail:
        own = call_ids(message)
        ids.append(blake2b(ids[-1] + own, digest_size=8).digest() if own else ids[-1])
    assistant = [m.role is Role.ASSISTANT for m in tail]
    answers = [i for i, spoke in enumerate(assistant) if spoke and not (i and assistant[i - 1])]
    users = [i for i, m in enumerate(tail) if m.role is Role.USER and takes_note(m)]
    fields = tuple((i, values[i]) for i, span in enumerate(view.spans) if not span.turn)
    return History(
        keys=tuple(keys),
        said=tuple(said),
        ids=tuple(ids),
        answers=tuple(answers),
        first=users[0] if users else HEAD_END,
        newest=users[-1] if users else HEAD_END,
        asked=answers[-1] if assistant and assistant[-1] else len(tail),
        lane=Lane(
            hint,
            tuple(sorted({pair for span in view.spans for pair in span.strict})),
            tuple(sorted({pair for span in view.spans for pair in span.weak})),
            fields,
            client,
        ),
    )


def noted(
    history: History,
    place: Place | None,
    texts: Mapping[int, str],
    newest_only: Collection[int],
    kept: Sequence[tuple[int, bytes]] = (),
) -> Notes:
    """Where each of these texts (by field) is told; `kept` are the spans that stay in the head, and their digests.

    A value goes into the first user message of a new conversation, else into the newest one, and stays there. Inside a
    tool loop, where the newest user message has been sent before, values stay as they were told. The fields
    `newest_only` are told in the newest user message and nowhere else.
    """
    old = place.notes if place else ()
    known, held = told(old), dict(place.step.large) if place else {}
    frozen = place is not None and history.newest <= place.step.newest
    target = history.newest if place is not None or history.answered else history.first
    new, large = list[Note](), list[tuple[int, str]]()
    for number, text in texts.items():
        if frozen and number in held:
            large.append((number, held[number]))
        elif known.get(number) == text or (frozen and number in known):
            continue
        elif number in newest_only:
            large.append((number, text))
        else:
            new.append(Note(target, number, text))
    by_message: dict[int, tuple[str, ...]] = {}
    for note in (*old, *new):
        by_message[note.at] = (*by_message.get(note.at, ()), note.text)
    if large:
        by_message[history.newest] = (*by_message.get(history.newest, ()), *(text for _, text in large))
    at = history.asked
    step = Step(
        history.keys[at],
        history.newest,
        len(new),
        tuple(large),
        prefill=history.prefill,
        ids=history.ids[at],
        kept=tuple(kept),
    )
    return Notes(by_message, _with_step(history, place, step, new, texts))


def _with_step(
    history: History, place: Place | None, step: Step, new: Sequence[Note], texts: Mapping[int, str]
) -> Conversation:
    if place is not None and place.is_last:
        ident = place.conversation.id
    else:
        # the same request again finds the same entry; another value under the same messages makes another one
        state = blake2b(place.conversation.id if place else b"", digest_size=16)
        told_here = repr((history.lane, sorted(texts.items()), step.kept))
        state.update(step.key + step.ids + told_here.encode("utf-8", "surrogatepass"))
        ident = state.digest()
    if place is None:
        return Conversation(ident, history.label, history.lane, (step,), tuple(new))
    conversation = extended(place.conversation, place.index, ident, step, new)
    return replace(conversation, lane=history.lane)
