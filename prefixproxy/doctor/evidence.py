"""All that doctor saw of one upstream, for the checks to judge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prefixproxy.doctor.template import Rendered
from prefixproxy.doctor.trial import Trial
from prefixproxy.facts.flags import Flags
from prefixproxy.facts.log import LogFacts
from prefixproxy.facts.report import RunFacts
from prefixproxy.types import Capabilities


@dataclass(frozen=True, slots=True)
class ModelFile:
    """What the GGUF says, where it can be read. `kv_bytes_per_token` at the cache types in force; `n_swa`: the window
    of layers that do not see everything, 0 without any."""

    arch: str
    n_ctx_train: int | None = None
    n_swa: int = 0
    kv_bytes_per_token: float | None = None


@dataclass(frozen=True, slots=True)
class Demand:
    """What the upstream is needed for: the settings' own minimum, and the conversations a proxy has seen on it."""

    min_n_ctx_slot: int = 0
    conversations: int = 0
    conversation_tokens: int = 0
    """Of all of them together, each at its longest."""
    longest_prompt: int = 0


@dataclass(frozen=True, slots=True)
class Evidence:
    """One upstream. `behind`: what a prefixproxy in front of it says about it (its entry in the status). `today`: the
    day as a template may spell it. `verified`: what `verify` found for this very model, build and flags, None if it
    was never run. `recorded_corruption`: reuse was seen to change answers on its architecture. `save_dir_open`:
    others on the machine can read the saved slots."""

    facts: RunFacts
    capabilities: Capabilities
    demand: Demand = field(default_factory=Demand)
    flags: Flags | None = None
    log: LogFacts | None = None
    model: ModelFile | None = None
    props: Mapping[str, Any] = field(default_factory=dict)
    reported: Mapping[str, Any] = field(default_factory=dict)
    behind: Mapping[str, Any] = field(default_factory=dict)
    template: str = ""
    rendered: Rendered | None = None
    today: Sequence[str] = ()
    trial: Trial = field(default_factory=Trial)
    verified: bool | None = None
    recorded_corruption: bool = False
    save_dir_open: bool = False

    @property
    def ram_mib(self) -> int | None:
        """The RAM cache's limit: 0 off, -1 none; None: not known."""
        if self.log is not None and self.log.ram_cache_mib is not None:
            return self.log.ram_cache_mib
        return None if self.flags is None else self.flags.ram_mib

    @property
    def total_ctx(self) -> int | None:
        """The context of all slots together, as it was asked for; None where that is not known."""
        return self.flags.ctx if self.flags is not None and self.flags.ctx else None

    @property
    def n_swa(self) -> int:
        if self.log is not None and self.log.n_swa is not None:
            return self.log.n_swa
        return self.model.n_swa if self.model is not None else 0

    @property
    def arch(self) -> str:
        if self.model is not None:
            return self.model.arch
        return (self.log.arch if self.log is not None else None) or ""

    @property
    def kv_bytes_per_token(self) -> float | None:
        """From the server's own allocation, else from the model's shapes, else as the proxy measured it."""
        if self.log is not None and self.log.kv:
            return sum(made.bytes_per_token for made in self.log.kv)
        if self.model is not None and self.model.kv_bytes_per_token is not None:
            return self.model.kv_bytes_per_token
        measured = (self.behind.get("scheduler") or {}).get("kv_bytes_per_token")
        return float(measured) if measured else None
