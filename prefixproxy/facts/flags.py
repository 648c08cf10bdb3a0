"""llama-server's command line: the flags that decide what its cache does, from its arguments or its environment.

Names and defaults as in common/arg.cpp and common/common.h. What is not among them is shown, not read.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from prefixproxy.types import DEFAULT_RAM_MIB

SECRETS = frozenset({"--api-key", "--api-key-file", "-hft", "--hf-token", "--ssl-key-file"})
MASK = "***"
DEFAULT_KV_TYPE = "f16"
KV_TYPE_NUMBERS = {0: "f32", 1: "f16", 2: "q4_0", 3: "q4_1", 6: "q5_0", 7: "q5_1", 8: "q8_0", 20: "iq4_nl", 30: "bf16"}
"""What a KV cache may be made of (common/arg.cpp), by the number in ggml_type."""
_ON, _OFF = frozenset({"on", "1", "true", "enabled", "yes"}), frozenset({"off", "0", "false", "disabled", "no"})

_VALUED = {
    "n_parallel": (("-np", "--parallel"), "LLAMA_ARG_N_PARALLEL"),
    "ctx": (("-c", "--ctx-size"), "LLAMA_ARG_CTX_SIZE"),
    "cache_ram_mib": (("-cram", "--cache-ram"), "LLAMA_ARG_CACHE_RAM"),
    "type_k": (("-ctk", "--cache-type-k"), "LLAMA_ARG_CACHE_TYPE_K"),
    "type_v": (("-ctv", "--cache-type-v"), "LLAMA_ARG_CACHE_TYPE_V"),
    "flash_attention": (("-fa", "--flash-attn"), "LLAMA_ARG_FLASH_ATTN"),
    "save_path": (("--slot-save-path",), ""),
    "sleep_s": (("--sleep-idle-seconds",), ""),
    "cache_reuse": (("--cache-reuse",), "LLAMA_ARG_CACHE_REUSE"),
    "model": (("-m", "--model"), "LLAMA_ARG_MODEL"),
}
_SWITCHES = {
    "kv_unified": (("-kvu", "--kv-unified"), ("-no-kvu", "--no-kv-unified"), "LLAMA_ARG_KV_UNIFIED"),
    "cache_idle_slots": (("--cache-idle-slots",), ("--no-cache-idle-slots",), "LLAMA_ARG_CACHE_IDLE_SLOTS"),
    "swa_full": (("--swa-full",), (), "LLAMA_ARG_SWA_FULL"),
    "context_shift": (("--context-shift",), ("--no-context-shift",), "LLAMA_ARG_CONTEXT_SHIFT"),
    "cache_prompt": (("--cache-prompt",), ("--no-cache-prompt",), "LLAMA_ARG_CACHE_PROMPT"),
}
_NAMED = {flag: name for name, (flags, _) in _VALUED.items() for flag in flags}
_SWITCHED = {flag: (name, True) for name, (on, _, _) in _SWITCHES.items() for flag in on} | {
    flag: (name, False) for name, (_, off, _) in _SWITCHES.items() for flag in off
}
ENVIRONMENT = frozenset(
    env for env in (*(env for _, env in _VALUED.values()), *(env for _, _, env in _SWITCHES.values())) if env
)
"""The variables that are read; others of a process (keys among them) are nobody's business."""


@dataclass(frozen=True, slots=True)
class Flags:
    """What the command line says; None where it says nothing, so that the server's default holds."""

    argv: tuple[str, ...]
    n_parallel: int | None = None
    ctx: int | None = None
    cache_ram_mib: int | None = None
    type_k: str | None = None
    type_v: str | None = None
    flash_attention: str | None = None
    save_path: str | None = None
    sleep_s: int | None = None
    cache_reuse: int | None = None
    model: str | None = None
    kv_unified: bool | None = None
    cache_idle_slots: bool | None = None
    swa_full: bool | None = None
    context_shift: bool | None = None
    cache_prompt: bool | None = None

    @property
    def unified(self) -> bool:
        """What llama-server makes of it: without a number of slots it takes 4 on one unified pool, whatever else is
        said (server.cpp)."""
        if self.n_parallel is None or self.n_parallel < 0:
            return True
        return bool(self.kv_unified)

    @property
    def kv_types(self) -> tuple[str, str]:
        """What keys and values of the cache are made of."""
        return self.type_k or DEFAULT_KV_TYPE, self.type_v or DEFAULT_KV_TYPE

    @property
    def ram_mib(self) -> int:
        """The RAM cache's limit; 0: off, -1: no limit."""
        return DEFAULT_RAM_MIB if self.cache_ram_mib is None else self.cache_ram_mib

    @property
    def clears_idle(self) -> bool:
        """Whether a request that starts clears the idle slots (`--cache-idle-slots`, server-context.cpp)."""
        return self.unified and self.cache_idle_slots is not False and self.ram_mib != 0


def read_flags(argv: Sequence[str], environment: Mapping[str, str] | None = None) -> Flags:
    """The flags of a command line without its program. A flag wins over its variable, the last of two over the
    first."""
    found = _from_environment(environment or {})
    for flag, value in _pairs(argv):
        if flag in _SWITCHED:
            name, on = _SWITCHED[flag]
            found[name] = on
        elif flag in _NAMED:
            # `-fa` took no value once, and stands for "on" then
            found[_NAMED[flag]] = "on" if value is None else value
    for name in ("n_parallel", "ctx", "cache_ram_mib", "sleep_s", "cache_reuse"):
        found[name] = _whole(found.get(name))
    return Flags(masked(argv), **found)  # type: ignore[arg-type]


def _from_environment(environment: Mapping[str, str]) -> dict[str, object]:
    found: dict[str, object] = {n: environment[env] for n, (_, env) in _VALUED.items() if env in environment}
    switched = ((n, environment[env]) for n, (_, _, env) in _SWITCHES.items() if env in environment)
    return found | {name: _switched(value) for name, value in switched}


def masked(argv: Sequence[str]) -> tuple[str, ...]:
    """The arguments with every secret's value replaced."""
    out: list[str] = []
    for argument in argv:
        name, equals, _ = argument.partition("=")
        if out and out[-1] in SECRETS:
            out.append(MASK)
        else:
            out.append(f"{name}={MASK}" if equals and name in SECRETS else argument)
    return tuple(out)


def shown_flags(argv: Sequence[str]) -> str:
    """As one would type them."""
    return shlex.join(argv)


def is_llama_server(program: str) -> bool:
    return PurePath(program).name.removesuffix(".exe") in ("llama-server", "llama-server-impl")


def _pairs(argv: Sequence[str]) -> list[tuple[str, str | None]]:
    """Each flag with what follows it, if that is no flag; a negative number is a value."""
    pairs: list[tuple[str, str | None]] = []
    for i, argument in enumerate(argv):
        if not argument.startswith("-") or _whole(argument) is not None:
            continue
        name, equals, value = argument.partition("=")
        following = argv[i + 1] if i + 1 < len(argv) else None
        if equals:
            pairs.append((name, value))
        elif following is not None and (not following.startswith("-") or _whole(following) is not None):
            pairs.append((name, following))
        else:
            pairs.append((name, None))
    return pairs


def _switched(value: str) -> bool | None:
    lowered = value.lower()
    return True if lowered in _ON else False if lowered in _OFF else None


def _whole(value: object) -> int | None:
    try:
        return int(str(value))
    except ValueError:
        return None
