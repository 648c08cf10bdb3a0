"""What will be sent upstream for one request, and why: the pure steps between the body and the queue.

The same plan serves the live path, a request that is stabilised again while it waits, and `explain`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakKeyDictionary

from prefixproxy.answers import AnswerMemory
from prefixproxy.body import Body, json_bytes
from prefixproxy.chat import Canonical, answer_message, apply_edits, canonical, cut_at, parse_prompt
from prefixproxy.chat_parts import NotUnderstood
from prefixproxy.compat import folded
from prefixproxy.patience.splice import returned
from prefixproxy.prefix import PrefixChain, blocks_within, chain_of
from prefixproxy.prompt import Edit, Prompt, holds_tokens
from prefixproxy.stabilise.stabiliser import Stabiliser
from prefixproxy.tools import ToolMemory
from prefixproxy.types import Api, Form, Relocation, TemplateFacts

Mode = Literal["apply", "observe", "off"]

KWARGS, EFFORT = "chat_template_kwargs", "reasoning_effort"


@dataclass(frozen=True, slots=True)
class Plan:
    """One request as it stands now. `prompt` is None for a body no dialect understands: that is sent as it came, and
    found again only by its bytes. `edits` are what stabilising does to the body; `relocations` what it cut (in mode
    observe: what it would cut)."""

    api: Api
    body: Body
    prompt: Prompt | None
    edits: tuple[Edit, ...]
    relocations: tuple[Relocation, ...]
    family: str
    conversation: str
    canonical: Canonical | None
    chain: PrefixChain
    head_blocks: int
    form: Form = Form.CHAT
    """How the prompt came."""

    def rendered(self, control: Sequence[Edit] = ()) -> bytes:
        """The body to send, with `control` (slot, streaming) added."""
        return self.body.render([*self.edits, *control])

    @property
    def starts(self) -> tuple[int, ...]:
        """Of its first and its last user message: digests of all before it (`PrefixChain.ends`)."""
        segments = () if self.canonical is None else self.canonical.segments
        starts = [start for label, start, _ in segments if label.startswith("user[")]
        found = (self.chain.end_at(start) for start in (*starts[:1], *starts[1:][-1:]))
        return tuple(digest for digest in found if digest is not None)

    @property
    def solid(self) -> tuple[tuple[int, int], ...]:
        """From where to where it cannot be cut, in bytes: messages that are no text alone."""
        if self.prompt is None or self.canonical is None:
            return ()
        whole = {f"[{i}]" for i, m in enumerate(self.prompt.messages) if len(m.texts) < len(m.parts)}
        return tuple((start, end) for label, start, end in self.canonical.segments if label[label.find("[") :] in whole)

    def cut_at(self, offset: int) -> tuple[dict[str, Any], int] | None:
        """See `chat.cut_at`."""
        if self.prompt is None or self.canonical is None:
            return None
        return cut_at(self.prompt, self.canonical, offset)


class Planner:
    """Owns what the stabilising steps remember. Not one of its methods waits."""

    def __init__(
        self,
        stabiliser: Stabiliser,
        tools: ToolMemory,
        answers: AnswerMemory,
        mode: Mode,
        *,
        compat: bool = False,
        answering: Callable[[str], str] = str,
        template_of: Callable[[str], TemplateFacts] = lambda model: TemplateFacts(),
    ) -> None:
        """`compat`: prompts are made such as strict templates take (`prefixproxy.compat`) before anything else.
        `answering`: the name of the model that answers a request for another name (`routing.answering`).
        `template_of`: what is known of its template (`routing.template_of`)."""
        self.stabiliser = stabiliser
        self.tools = tools
        self.answers = answers
        self.mode: Mode = mode
        self._compat = compat
        self._answering = answering
        self._template_of = template_of
        self._folded: WeakKeyDictionary[Body, Body] = WeakKeyDictionary()
        self._prompts: WeakKeyDictionary[Body, Prompt | None] = WeakKeyDictionary()

    def read_ahead(self, api: Api, body: Body, *, off: bool = False) -> Iterator[None]:
        """The part of planning that may take long, in slices of a few milliseconds: whoever has others to serve does
        so between two of them. Leaving it out changes no plan."""
        prompt = None if off or self.mode == "off" else self._read(api, self._taken(api, body))
        if prompt is not None:
            yield from self.stabiliser.read_ahead(prompt)

    def arrive(self, api: Api, body: Body, request_id: str, now: float, *, lane: str = "", off: bool = False) -> bool:
        """A new request is seen, before it is planned. True if it taught something, so that the requests that wait
        should be planned anew."""
        prompt = None if off or self.mode == "off" else self._read(api, self._taken(api, body))
        if prompt is None:
            return False
        return self.stabiliser.observe(prompt, now, request_id=request_id)

    def read(self, api: Api, body: Body) -> Prompt | None:
        """The prompt before any stabilising; None for a body no dialect understands."""
        return self._read(api, self._taken(api, body))

    def plan(
        self,
        api: Api,
        body: Body,
        request_id: str,
        now: float,
        *,
        lane: str = "",
        client: str = "",
        off: bool = False,
    ) -> Plan:
        """Decide and remember. Called again for the same `request_id`, it replaces what the first call remembered.
        `client` is the client's own name for the conversation (`identity.conversation_of`)."""
        taken = body if off else self._taken(api, body)
        return self._plan(api, taken, now, (lane, client), "off" if off else self.mode, request_id)

    def explain(self, api: Api, body: Body, now: float, *, lane: str = "") -> Plan:
        """What `plan` would answer; nothing is remembered."""
        return self._plan(api, self._taken(api, body), now, (lane, ""), self.mode, None)

    def answered(self, request_id: str, answer: Mapping[str, Any]) -> None:
        """The assistant message, in the chat API's shape, that this request was given."""
        try:
            self.stabiliser.answered(request_id, answer_message(answer))
        except NotUnderstood:
            return

    def forget(self, request_id: str) -> None:
        """The request was never sent: it is in nobody's history."""
        self.stabiliser.forget_request(request_id)

    def _taken(self, api: Api, body: Body) -> Body:
        """The body as the template takes it."""
        if not self._compat:
            return body
        if body not in self._folded:
            self._folded[body] = folded(api, body)
        return self._folded[body]

    def _read(self, api: Api, body: Body) -> Prompt | None:
        """The body's prompt. It is read once, though a request is planned at its arrival and again while it waits."""
        if body not in self._prompts:
            self._prompts[body] = parse_prompt(api, body)
        return self._prompts[body]

    def _plan(
        self, api: Api, body: Body, now: float, names: tuple[str, str], mode: Mode, request_id: str | None
    ) -> Plan:
        prompt = self._read(api, body)
        if prompt is None:
            return _opaque_plan(api, body)
        edits: list[Edit] = []
        relocations: tuple[Relocation, ...] = ()
        family = conversation = ""
        if mode != "off":
            live = mode == "apply" and request_id is not None
            steadied = self._steady(prompt, remember=request_id is not None)
            edited = apply_edits(prompt, steadied)
            lane, client = names
            if live:
                done = self.stabiliser.apply(edited, now, lane=lane, client=client, request_id=request_id or "")
            else:
                done = self.stabiliser.preview(edited, now, lane=lane)
            relocations, family, conversation = done.relocations, done.family, done.conversation
            if mode == "apply":
                edits, prompt = [*steadied, *done.edits], done.prompt
        template = self._template_of(prompt.model)
        canon = canonical(prompt, template)
        chain = chain_of(canon.parts, salt=_salt(self._answering(prompt.model), body, template))
        head_blocks = blocks_within(canon.head_bytes)
        return Plan(
            api=api,
            body=body,
            prompt=prompt,
            edits=tuple(edits),
            relocations=relocations,
            family=family or _family_of(chain, head_blocks),
            conversation=conversation,
            canonical=canon,
            chain=chain,
            head_blocks=head_blocks,
            form=_form_of(prompt, body.data.get("prompt"), template),
        )

    def _steady(self, prompt: Prompt, *, remember: bool) -> tuple[Edit, ...]:
        """Tool definitions, replayed tool calls and begun answers in the bytes this server has seen before."""
        tools = self.tools if remember else self.tools.copy()
        return (*tools.apply(prompt), *self.answers.apply(prompt), *returned(prompt))


def _form_of(prompt: Prompt, asked: object, template: TemplateFacts) -> Form:
    if not prompt.raw:
        return Form.CHAT
    if holds_tokens(asked):
        return Form.TOKENS
    return Form.RENDERED if isinstance(asked, str) and template.opens(asked) else Form.TEXT


def _salt(answering: str, body: Body, template: TemplateFacts) -> bytes:
    """What changes the rendered prompt at its very front without standing in it: the model, and the template's own
    switches. `tool_choice` and the like stay out: most templates do not render them, and one conversation uses many."""
    model = answering.encode("utf-8", "surrogatepass")
    kwargs, effort = body.data.get(KWARGS), body.data.get(EFFORT)
    if isinstance(kwargs, dict):
        kwargs = {name: value for name, value in kwargs.items() if template.heeds(name, value)}
    switches = {KWARGS: kwargs} if kwargs else {}
    if effort is not None and template.heeds(EFFORT, effort):
        switches[EFFORT] = effort
    return model + b"\0" + json_bytes(switches) if switches else model


def _opaque_plan(api: Api, body: Body) -> Plan:
    chain = chain_of([body.raw])
    return Plan(api, body, None, (), (), _family_of(chain, 0), "", None, chain, 0)


def _family_of(chain: PrefixChain, head_blocks: int) -> str:
    root = chain.head(head_blocks) if head_blocks else chain
    return f"{root.digest:016x}"
