"""What one model keeps in its KV cache: bytes for each token, from the shapes its GGUF states.

As llama.cpp allocates it (src/llama-kv-cache.cpp, llama-kv-cache-iswa.cpp, llama-context.cpp; build 11434): for each
layer one tensor of keys and one of values, `heads x head length` wide, as many cells long as a sequence has context.
Layers with a sliding window have a cache of their own. What an architecture does beside that and is not modelled here
is said in `notes`; one that is not known is `None`, never a guess.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from prefixproxy.capacity.gguf import Header

PAD_TOKENS = 256
UBATCH_TOKENS = 512
MIB = 1 << 20
MAX_LAYERS = 4096

TYPES = {
    "f32": (1, 4),
    "f16": (1, 2),
    "bf16": (1, 2),
    "q8_0": (32, 34),
    "q5_1": (32, 24),
    "q5_0": (32, 22),
    "q4_1": (32, 20),
    "q4_0": (32, 18),
    "iq4_nl": (32, 18),
}
"""What a cache may be made of: values in a block, and its bytes."""

PLAIN = frozenset(
    """
    apertus arcee baichuan bailingmoe bailingmoe2 bloom chatglm codeshell command-r dbrx deci deepseek dots1
    ernie4_5 ernie4_5-moe exaone falcon gemma glm4 glm4moe gpt2 gptneox granite granitemoe grok hunyuan-dense
    hunyuan-moe internlm2 jais llama maincoder minicpm minimax-m2 mistral3 mpt nemotron olmo olmoe openelm orion
    phi2 phimoe plamo qwen qwen2 qwen2moe qwen2vl qwen3 qwen3moe qwen3vl qwen3vlmoe refact seed_oss smollm3
    stablelm starcoder starcoder2 xverse
    """.split()
)
"""Every layer sees everything, keys and values as the metadata says. `deci`, `openelm` and the like vary by layer."""
WINDOWED = {"gemma2": 2, "gemma3": 6, "cohere2": 4, "gpt-oss": 2, "exaone4": 4}
"""Sliding windows, and after how many layers one sees everything, unless the file has the pattern."""
LATENT = frozenset({"deepseek2"})
"""MLA: one latent vector for each token and layer where the file has its lengths, and no values."""
RECURRENT = frozenset({"mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"})
HYBRID = frozenset({"jamba", "falcon-h1", "granitehybrid", "nemotron_h", "nemotron_h_moe", "plamo2", "lfm2", "lfm2moe"})
"""Layers with a state beside layers with a cache; which ones, the number of heads of each layer says."""
INTERVAL = frozenset({"qwen3next", "qwen35", "qwen35moe"})
"""Hybrid too; every n-th layer has a cache (`full_attention_interval`)."""


@dataclass(frozen=True, slots=True)
class Layer:
    """Heads with a cache in one layer, and the numbers in a key and in a value of each; `window`: it has the small
    cache."""

    heads: int
    k_length: int
    v_length: int
    window: bool = False

    def bytes_per_token(self, type_k: str, type_v: str) -> int:
        return self.heads * (row_bytes(type_k, self.k_length) + row_bytes(type_v, self.v_length))


@dataclass(frozen=True, slots=True)
class Shape:
    """What is known of a model's cache. `n_swa`: the window of layers that have one, in tokens. `state_bytes`: of a
    recurrent state, for each slot. `exact`: nothing beside the KV cache is left out of it."""

    arch: str
    n_ctx_train: int | None
    layers: tuple[Layer, ...]
    n_swa: int = 0
    state_bytes: int = 0
    exact: bool = True
    notes: tuple[str, ...] = field(default=())

    def bytes_per_token(self, type_k: str, type_v: str, *, window: bool | None = None) -> int:
        """Of all layers, or only of those with (True) or without (False) a window. Raises ValueError for a type that
        the heads do not allow."""
        chosen = [layer for layer in self.layers if window is None or layer.window == window]
        return sum(layer.bytes_per_token(type_k, type_v) for layer in chosen)

    def kv_bytes(
        self,
        n_slots: int,
        n_ctx_slot: int,
        type_k: str,
        type_v: str,
        *,
        swa_full: bool = False,
        unified: bool = False,
        n_ubatch: int = UBATCH_TOKENS,
    ) -> int:
        """The KV cache for slots of `n_ctx_slot` tokens (see `fitted_context`); unified: of all together."""
        streams = 1 if unified else n_slots
        window = min(n_ctx_slot, _padded(self.n_swa * (n_slots if unified else 1) + n_ubatch))
        cells = n_ctx_slot if swa_full else window
        all_seen = self.bytes_per_token(type_k, type_v, window=False) * n_ctx_slot * streams
        return all_seen + self.bytes_per_token(type_k, type_v, window=True) * cells * streams


def fitted_context(n_slots: int, total: int) -> int:
    """`n_ctx_slot` for `-c total -np n_slots`: rounded up to 256 twice (llama-context.cpp)."""
    return _padded(_padded(total) // n_slots)


def row_bytes(kind: str, length: int) -> int:
    """Bytes of one head's key or value."""
    block, size = TYPES[kind]
    if length % block:
        raise ValueError(f"{kind} needs heads whose length divides by {block}, and this model's is {length}")
    return length // block * size


def shape_of(header: Header) -> Shape | str:
    """The shape, or in one line why it is not known."""
    arch = header.arch
    known = arch in PLAIN or arch in WINDOWED or arch in LATENT or arch in RECURRENT or arch in HYBRID | INTERVAL
    if not known:
        return f"the architecture {arch!r} is not known here: its KV cache is not computed"
    n_layers = header.own("block_count")
    if isinstance(n_layers, int) and n_layers > MAX_LAYERS:
        return f"{n_layers} layers cannot be"
    try:
        return _shape(header)
    except (KeyError, TypeError, ValueError, StopIteration, ZeroDivisionError):
        return f"the file does not state the shapes that {arch!r} needs"


def _shape(header: Header) -> Shape:
    arch, n_ctx_train = header.arch, header.whole("context_length")
    n_layers = int(header.own("block_count")) - int(header.own("nextn_predict_layers") or 0)
    if arch in RECURRENT:
        state, notes = _state(header, n_layers)
        return Shape(arch, n_ctx_train, (), state_bytes=state, exact=not notes, notes=notes)
    heads = _per_layer(header.own("attention.head_count_kv") or header.own("attention.head_count"), n_layers)
    k_length, v_length = _head_lengths(header)
    if arch in LATENT and header.own("attention.key_length_mla") and header.own("attention.value_length_mla"):
        layers = tuple(Layer(n, k_length, 0) for n in heads)
        return Shape(arch, n_ctx_train, layers, notes=("MLA: builds before 2026 keep values too.",))
    if arch in INTERVAL:
        interval = int(header.own("full_attention_interval") or 4)
        heads = [n if (i + 1) % interval == 0 else 0 for i, n in enumerate(heads)]
    windows, n_swa, notes = _windows(header, n_layers)
    if header.own("nextn_predict_layers"):
        notes = (*notes, "The layers that predict further tokens are left out: they have a cache only when drafting.")
    layers = tuple(Layer(n, k_length, v_length, w) for n, w in zip(heads, windows, strict=True) if n)
    if arch in HYBRID | INTERVAL:
        notes = (*notes, "Hybrid: the recurrent state of each slot, and its checkpoints in RAM, are not modelled.")
    return Shape(arch, n_ctx_train, layers, n_swa, exact=not notes, notes=notes)


def _head_lengths(header: Header) -> tuple[int, int]:
    heads = header.own("attention.head_count")
    first = int(next(n for n in heads if n) if isinstance(heads, tuple) else heads)
    length = int(header.own("embedding_length")) // first
    return int(header.own("attention.key_length") or length), int(header.own("attention.value_length") or length)


def _windows(header: Header, n_layers: int) -> tuple[Sequence[bool], int, tuple[str, ...]]:
    """Which layers have a window, how long it is, and what is not modelled of it."""
    n_swa, pattern = int(header.own("attention.sliding_window") or 0), header.own("attention.sliding_window_pattern")
    none = [False] * n_layers
    if not n_swa:
        return none, 0, ()
    if isinstance(pattern, tuple) and pattern:
        return [bool(pattern[i % len(pattern)]) for i in range(n_layers)], n_swa, ()
    period = int(pattern) if isinstance(pattern, int) else WINDOWED.get(header.arch)
    if period is None:
        return none, 0, (f"It states a window of {n_swa:,} tokens: taken as if every layer saw everything.",)
    return [period == 0 or i % period < period - 1 for i in range(n_layers)], n_swa, ()


def _state(header: Header, n_layers: int) -> tuple[int, tuple[str, ...]]:
    """Bytes of one slot's recurrent state; Mamba's convolution and state, 32-bit floats."""
    if header.arch not in ("mamba", "mamba2"):
        return 0, (f"The recurrent state of {header.arch} is not modelled; it does not grow with the context.",)
    inner, state = int(header.own("ssm.inner_size")), int(header.own("ssm.state_size"))
    groups, kernel = int(header.own("ssm.group_count") or 0), int(header.own("ssm.conv_kernel"))
    numbers = (kernel - 1) * (inner + 2 * groups * state) + state * inner
    return 4 * n_layers * numbers, ()


def _per_layer(value: Any, n_layers: int) -> list[int]:
    if isinstance(value, tuple):
        return [int(n) for n in value[:n_layers]]
    return [int(value)] * n_layers


def _padded(tokens: int) -> int:
    return -(-tokens // PAD_TOKENS) * PAD_TOKENS
