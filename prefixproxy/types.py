"""The values handed from one part to the next: closed vocabularies and frozen records, no behaviour.

Units are in the names: `_s` seconds, `_ms` milliseconds, `_tokens`, `_bytes`. None means unknown, never zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, NewType

TicketId = NewType("TicketId", str)
"""One client request, from arrival to its journal record; also the `x-prefixproxy-request-id`."""

RootId = NewType("RootId", str)
"""One root that is being, or has been, warmed: a stable digest of its canonical bytes and model."""


class SlotId(NamedTuple):
    """One KV sequence of one llama-server: `slot` is the wire's `id_slot`, 0 .. total_slots-1."""

    upstream: str
    slot: int


class Api(StrEnum):
    """Whose wire format a body has."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    COMPLETION = "completion"
    INFILL = "infill"
    RESPONSES = "responses"
    MESSAGES = "messages"
    OLLAMA_CHAT = "ollama_chat"
    OLLAMA_GENERATE = "ollama_generate"


API_OF_PATH: dict[str, Api] = {
    "/v1/chat/completions": Api.CHAT,
    "/chat/completions": Api.CHAT,
    "/v1/completions": Api.COMPLETIONS,
    "/completion": Api.COMPLETION,
    "/completions": Api.COMPLETION,
    "/infill": Api.INFILL,
    "/v1/responses": Api.RESPONSES,
    "/responses": Api.RESPONSES,
    "/v1/messages": Api.MESSAGES,
    "/api/chat": Api.OLLAMA_CHAT,
    "/api/generate": Api.OLLAMA_GENERATE,
}
"""The paths that generate: stabilised, routed, admitted and measured. Everything else is passed through."""

PINNABLE = frozenset({Api.CHAT, Api.COMPLETIONS, Api.COMPLETION, Api.INFILL, Api.RESPONSES})
"""APIs whose bodies llama-server reads `id_slot` from; /v1/messages drops it (server-chat.cpp)."""


class Priority(StrEnum):
    INTERACTIVE = "interactive"
    BATCH = "batch"


class Outcome(StrEnum):
    """How a request ended; the `outcome` label and journal field."""

    OK = "ok"
    UPSTREAM_ERROR = "upstream_error"
    CLIENT_GONE = "client_gone"
    REJECTED = "rejected"
    TIMED_OUT = "timed_out"
    UPSTREAM_DOWN = "upstream_down"
    BAD_REQUEST = "bad_request"


class Kind(StrEnum):
    """What a request is to the prompts seen before it."""

    ROOT = "root"
    FORK = "fork"
    CONTINUATION = "continuation"
    REWRITE = "rewrite"
    COMPACTION = "compaction"
    REDUCER = "reducer"
    SIDE = "side"
    UNIQUE = "unique"


class MissReason(StrEnum):
    NONE = "none"
    COLD_ROOT = "cold_root"
    ROOT_CHANGED = "root_changed"
    TOOLS_CHANGED = "tools_changed"
    HISTORY_CHANGED = "history_changed"
    SLOT_EVICTED = "slot_evicted"
    FORK_FAILED = "fork_failed"
    NO_ROLLBACK = "no_rollback"
    UPSTREAM_RESTARTED = "upstream_restarted"
    REUSE_OFF = "reuse_off"
    UNKNOWN = "unknown"


class CacheSource(StrEnum):
    """Where a cached-token count comes from."""

    REPORTED = "reported"
    INFERRED = "inferred"
    UNKNOWN = "unknown"


class SlotState(StrEnum):
    """idle: free; leased: one request; reserved: warm, save or restore running; draining: our side ended but
    the server has not been seen idle; foreign: busy with somebody else's request."""

    IDLE = "idle"
    LEASED = "leased"
    RESERVED = "reserved"
    DRAINING = "draining"
    FOREIGN = "foreign"


@dataclass(frozen=True, slots=True)
class Usage:
    """What the server said one request cost. `cached + evaluated = prompt` where all are known."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    evaluated_tokens: int | None = None
    predicted_tokens: int | None = None
    prompt_ms: float | None = None
    predicted_ms: float | None = None
    source: CacheSource = CacheSource.UNKNOWN


@dataclass(frozen=True, slots=True)
class Relocation:
    """One piece of text that a rule cut: where it stood (`segment`, e.g. "system[0]") and its UTF-8 bytes."""

    rule: str
    segment: str
    bytes: int


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """The first byte in which a prompt left the one that was resident, and the tokens behind it."""

    segment: str
    offset: int
    tokens_after: int


DEFAULT_RAM_MIB = 8192
"""Of llama-server's RAM cache, if nothing else was said (common.h, `cache_ram_mib`)."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a probe found an upstream able to do; the scheduler asks for these, never for a kind."""

    pin: bool = False
    observe: bool = False
    snapshot: bool = False
    warm: bool = False
    reports_cached: bool = False
    tokenize: bool = False
    template: bool = False
    native: bool = False
    """It is llama-server: it takes that server's control keys in a body, and 503 means that it is loading."""
    shared_cache: bool = False
    """What one request evaluated serves every other, whichever of them runs."""
    rolls_back: bool | None = None
    """Whether a slot can forget the tail of a short prompt and keep the rest; None: not tried, or it did not tell."""
    host_cache: bool | None = None
    """Whether what loses its slot is kept in host memory (`--cache-ram`); None: not known."""
    clears_idle: bool | None = None
    """Whether a request that starts clears the slots that are idle (one unified KV pool); None: not known."""


MARK_CHARACTERS = 6
"""So long at least is what marks a turn in the templates that have marks ("[INST]", "<|user|>", "<|im_start|>")."""


class Form(StrEnum):
    """How a prompt came. The same tokens may come in two forms, and nobody but the server sees that they are the same:
    a chat, and a text that was rendered from one by the same template (`RENDERED`: it begins as that does); any of
    them, and a list of tokens."""

    CHAT = "chat"
    RENDERED = "rendered"
    TEXT = "text"
    TOKENS = "tokens"

    def may_be(self, other: Form) -> bool:
        """Whether a prompt in one form may be the same as one in the other."""
        if self is other:
            return False
        return Form.TOKENS in (self, other) or Form.TEXT not in (self, other)


@dataclass(frozen=True, slots=True)
class TemplateFacts:
    """What a chat template makes of a prompt beside its messages.

    `opening`: what it puts in front of a user's message that is the first one: a system text of its own, often with
    today's date, and the role. `shows_tools`: whether tools change the prompt. `names`: every name in it, None if it is
    not known. `late`: switches that, on or off, change nothing before the end of the last message.
    """

    opening: str = ""
    shows_tools: bool = True
    names: frozenset[str] | None = None
    late: frozenset[str] = frozenset()

    def opens(self, text: str) -> bool:
        """Whether a text begins as chats do: with the first characters of what the template writes."""
        mark = self.opening[:MARK_CHARACTERS]
        return len(mark) == MARK_CHARACTERS and text.startswith(mark)

    def heeds(self, switch: str, value: object) -> bool:
        """Whether a switch of the template may change the prompt before its end."""
        if self.names is not None and switch not in self.names:
            return False
        return not (switch in self.late and isinstance(value, bool))


@dataclass(frozen=True, slots=True)
class UpstreamFacts:
    """One probe's answer. `n_ctx_slot` in tokens; `models` the names it answers to (empty: any)."""

    name: str
    kind: str
    n_slots: int
    n_ctx_slot: int | None = None
    model: str = ""
    models: tuple[str, ...] = ()
    build: str = ""
    capabilities: Capabilities = field(default_factory=Capabilities)
    multimodal: bool = False
    shared: bool = False
    """Others may send it requests behind our back."""
    architecture: str = ""
    """As the model's file names it, "" where that is not known."""
    template: TemplateFacts = TemplateFacts()
    ram_mib: int = 0
    """Memory in which it keeps what loses its slot (`--cache-ram`), -1 for as much as it takes; 0 if there is none.
    Taken to be llama-server's default where nothing tells."""
    kv_types: tuple[str, str] | None = None
    """What keys and values of its cache are made of ("f16", "q8_0"), None where that is not known."""
    reuses_unasked: bool | None = None
    """Whether it reuses anything for a request that does not ask for that (with `--no-cache-prompt` it does not); None
    where that is not known."""
    reuse_off: str = ""
    """Why nothing may be reused there; "" if it may."""
    tried: Mapping[int, Usage] = field(default_factory=dict)
    """What this probe had it evaluate, by slot."""
    rank: int = 0
    """Its place in the settings."""
    owner: str = ""
    """What tells who saves files there from another proxy's upstream of the same name."""


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """The journal's record of one request; the contract names every field."""

    id: str
    time: float
    tenant: str
    path: str
    model: str
    upstream: str
    stream: bool
    kind: Kind
    family: str
    lane: str
    slot: int | None
    outcome: Outcome
    status: int
    prompt_tokens: int | None
    cache_n: int | None
    prompt_n: int | None
    cache_source: CacheSource
    expected_cached: int | None
    miss_reason: MissReason
    queue_ms: float
    overhead_ms: float
    ttft_ms: float | None
    total_ms: float
    predicted_n: int | None
    prompt_ms: float | None
    fork: bool
    relocations: tuple[Relocation, ...] = ()
    first_difference: FirstDifference | None = None
    context_exceeded: bool = False
    truncated: bool = False
    arm: str = ""
    reference: str = ""
