"""plan: headers as they are read, what each kind of attention keeps, what fits, and what is said to be unknown."""

from __future__ import annotations

import io
import struct
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gguf import GGML_QUANT_SIZES
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixproxy.capacity.command import PlanOptions, planned
from prefixproxy.capacity.fit import Logged, Model, compare, contexts_of, largest_context, logged_size, most_slots
from prefixproxy.capacity.gguf import BLOCKS, Header, NotGguf, read_header, split_names
from prefixproxy.capacity.shapes import MIB, Shape, fitted_context, shape_of
from prefixproxy.capacity.show import as_json, report_lines
from prefixproxy.errors import UsageError
from prefixproxy.facts.log import read_log

_FORMS = {int: (4, "<I"), float: (6, "<f"), bool: (7, "<?")}


def string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(given: Any) -> bytes:
    """A value with its type in front."""
    if isinstance(given, str):
        return struct.pack("<I", 8) + string(given)
    if isinstance(given, tuple):
        kind = value(given[0])[:4]
        items = b"".join(value(item)[4:] for item in given)
        return struct.pack("<I", 9) + kind + struct.pack("<Q", len(given)) + items
    kind_number, form = _FORMS[type(given)]
    return struct.pack("<I", kind_number) + struct.pack(form, given)


def gguf(metadata: dict[str, Any], weights: bytes = b"", n_tensors: int = 0) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", 3, n_tensors, len(metadata))
    body = b"".join(string(key) + value(each) for key, each in metadata.items())
    for i in range(n_tensors):
        body += string(f"blk.{i}") + struct.pack("<I", 2) + struct.pack("<QQ", 4, 4) + struct.pack("<IQ", 0, 0)
    head += body
    return head + bytes(-len(head) % 32) + weights


def model(arch: str, n_layers: int = 32, **own: Any) -> dict[str, Any]:
    shapes = {"block_count": n_layers, "context_length": 8192, "embedding_length": 4096, "attention.head_count": 32}
    return {"general.architecture": arch} | {f"{arch}.{key}": each for key, each in {**shapes, **own}.items()}


def header(arch: str, n_layers: int = 32, **own: Any) -> Header:
    raw = gguf(model(arch, n_layers, **own))
    return read_header(io.BytesIO(raw), len(raw))


def shape(arch: str, n_layers: int = 32, **own: Any) -> Shape:
    found = shape_of(header(arch, n_layers, **own))
    assert isinstance(found, Shape), found
    return found


KV_HEADS = {"attention.head_count_kv": 8}


def test_a_header_is_read_without_its_long_arrays() -> None:
    metadata = {
        **model("llama", **KV_HEADS),
        "tokenizer.ggml.tokens": tuple(f"t{i}" for i in range(5000)),
        "tokenizer.ggml.scores": tuple(float(i) for i in range(5000)),
        "llama.rope.sections": (1, 2, 3),
        "general.quantized": True,
    }
    raw = gguf(metadata, bytes(96), n_tensors=3)
    found = read_header(io.BytesIO(raw), len(raw))
    assert (found.arch, found.own("block_count"), found.own("rope.sections")) == ("llama", 32, (1, 2, 3))
    assert (found.n_tensors, found.weights_bytes) == (3, 96)
    assert "tokenizer.ggml.tokens" not in found.metadata
    assert found.metadata["general.quantized"] is True


@settings(deadline=None)
@given(st.integers(0, 400), st.integers(0, 255))
def test_a_damaged_header_is_refused_in_words_or_read(position: int, byte: int) -> None:
    raw = bytearray(gguf(model("llama", **KV_HEADS), bytes(64), n_tensors=1))
    raw[position % len(raw)] = byte
    for damaged in (bytes(raw), bytes(raw[:position])):
        with suppress(NotGguf):
            found = read_header(io.BytesIO(damaged), len(damaged))
            assert isinstance(shape_of(found), Shape | str)


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"", "ends in the middle"),
        (b"PK\x03\x04" + bytes(40), "no GGUF"),
        (b"GGUF" + struct.pack("<IQQ", 9, 0, 0), "version 9"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 40), "cannot be"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1 << 60), "cannot be"),
        (gguf({"a": "b"})[:-40], "ends in the middle"),
    ],
)
def test_what_is_no_model_is_told(raw: bytes, why: str) -> None:
    with pytest.raises(NotGguf, match=why):
        read_header(io.BytesIO(raw), len(raw))


@pytest.mark.parametrize("missing", [1, 33, 64])
def test_a_file_that_lacks_a_part_of_its_tensors_is_refused(missing: int) -> None:
    raw = gguf(model("llama", **KV_HEADS), bytes(64 - missing), n_tensors=2)
    with pytest.raises(NotGguf, match=f"cut off: {missing} bytes of its tensors are missing"):
        read_header(io.BytesIO(raw), len(raw))


def test_the_blocks_of_weights_are_those_of_the_gguf_package() -> None:
    theirs = {int(kind): tuple(sizes) for kind, sizes in GGML_QUANT_SIZES.items()}
    # Q8_1 is no type of weights, and that package's figure for it is not ggml's
    assert {kind: sizes for kind, sizes in BLOCKS.items() if kind != 9}.items() <= theirs.items()


def test_a_model_in_parts_is_known_by_its_name() -> None:
    assert split_names("m-00001-of-00003.gguf")[2] == "m-00003-of-00003.gguf"
    assert split_names("m.gguf") == ["m.gguf"]


@pytest.mark.parametrize(
    ("found", "per_token"),
    [
        (shape("llama", **KV_HEADS), 32 * 2 * 8 * 128 * 2),
        (shape("llama"), 32 * 2 * 32 * 128 * 2),
        (shape("qwen3", **KV_HEADS, **{"attention.key_length": 64, "attention.value_length": 32}), 32 * 8 * 96 * 2),
        (shape("deci", 4, **{"attention.head_count_kv": (8, 0, 4, 8)}), 20 * 2 * 128 * 2),
        (shape("glm4moe", 47, **KV_HEADS, nextn_predict_layers=1), 46 * 2 * 8 * 128 * 2),
        (
            shape(
                "deepseek2",
                61,
                **{
                    "attention.head_count_kv": 1,
                    "attention.key_length": 576,
                    "attention.value_length": 512,
                    "attention.key_length_mla": 192,
                    "attention.value_length_mla": 128,
                },
            ),
            61 * 576 * 2,
        ),
        (shape("jamba", 4, **{"attention.head_count_kv": (0, 8, 0, 0)}), 2 * 8 * 128 * 2),
        (shape("qwen3next", 48, **KV_HEADS, full_attention_interval=4), 12 * 2 * 8 * 128 * 2),
        (shape("mamba", 2, **{"ssm.inner_size": 8, "ssm.state_size": 4, "ssm.conv_kernel": 4}), 0),
    ],
)
def test_bytes_for_each_token_follow_from_the_shapes(found: Shape, per_token: int) -> None:
    assert found.bytes_per_token("f16", "f16") == per_token


def test_what_is_not_modelled_is_said() -> None:
    assert "recurrent state" in shape("jamba", 4, **{"attention.head_count_kv": (0, 8, 0, 0)}).notes[0]
    assert (
        "as if every layer saw everything" in shape("qwen2", **KV_HEADS, **{"attention.sliding_window": 512}).notes[0]
    )
    assert "not modelled" in shape("rwkv7").notes[0]
    assert shape("llama", **KV_HEADS).exact
    assert not shape("rwkv7").exact


@pytest.mark.parametrize("arch", ["kimi-linear", "llama4", "brand-new", ""])
def test_an_unknown_architecture_is_never_guessed_at(arch: str) -> None:
    found = shape_of(header(arch, **KV_HEADS))
    assert isinstance(found, str)
    assert arch in found


def test_a_number_of_layers_that_cannot_be_is_refused() -> None:
    assert shape_of(header("llama", 1 << 24, **KV_HEADS)) == "16777216 layers cannot be"


def test_a_number_that_is_none_is_no_shape() -> None:
    for wrong in ({"block_count": "four"}, {"attention.head_count": (0, 0)}, {"embedding_length": "wide"}):
        assert "does not state the shapes" in str(shape_of(header("llama", **wrong)))


def test_a_file_that_lacks_the_shapes_says_so() -> None:
    raw = gguf({"general.architecture": "llama"})
    assert "does not state" in str(shape_of(read_header(io.BytesIO(raw), len(raw))))


def test_layers_with_a_window_have_a_small_cache_unless_it_is_kept_whole() -> None:
    found = shape("gpt-oss", 24, **KV_HEADS, **{"attention.sliding_window": 128})
    assert sum(layer.window for layer in found.layers) == 12
    one = 2 * 8 * 128 * 2
    assert found.kv_bytes(4, 8192, "f16", "f16") == 4 * 12 * one * (8192 + 768)
    assert found.kv_bytes(4, 8192, "f16", "f16", swa_full=True) == 4 * 24 * one * 8192
    assert found.kv_bytes(4, 32768, "f16", "f16", unified=True) == 12 * one * (32768 + 1024)
    assert found.kv_bytes(1, 512, "f16", "f16") == 24 * one * 512
    stated = shape(
        "gemma3", 4, **KV_HEADS, **{"attention.sliding_window": 512, "attention.sliding_window_pattern": (True, False)}
    )
    assert [layer.window for layer in stated.layers] == [True, False, True, False]


def test_quantised_types_take_their_blocks_and_need_heads_that_divide() -> None:
    found = shape("llama", **KV_HEADS)
    assert found.bytes_per_token("q8_0", "q4_0") == 32 * 8 * (128 // 32 * 34 + 128 // 32 * 18)
    small = shape("llama", **KV_HEADS, **{"attention.key_length": 80})
    with pytest.raises(ValueError, match="divides by 32"):
        small.bytes_per_token("q8_0", "f16")


@pytest.mark.parametrize(
    ("n_slots", "total", "expected"), [(6, 8192, 1536), (4, 16384, 4096), (3, 4096, 1536), (1, 1000, 1024)]
)
def test_the_context_of_a_slot_is_divided_and_rounded_up(n_slots: int, total: int, expected: int) -> None:
    assert fitted_context(n_slots, total) == expected


PLAIN = Model(1000, lambda n_slots, n_ctx_slot: 10 * n_slots * n_ctx_slot, n_ctx_train=8192)


@settings(deadline=None)
@given(st.integers(1, 64), st.integers(0, 10_000_000))
def test_the_largest_fit_fits_and_nothing_larger_does(n_slots: int, memory: int) -> None:
    fit = largest_context(PLAIN, n_slots, memory)
    if fit is None:
        assert PLAIN.needs(n_slots, 256) > memory
        return
    assert fit.needs_bytes == PLAIN.needs(n_slots, fit.n_ctx_slot) <= memory
    assert fit.n_ctx_slot == 8192 or PLAIN.needs(n_slots, fit.n_ctx_slot + 256) > memory


@settings(deadline=None)
@given(st.sampled_from([256, 4096, 8192]), st.integers(0, 10_000_000))
def test_the_most_slots_fit_and_one_more_does_not(n_ctx_slot: int, memory: int) -> None:
    fit = most_slots(PLAIN, n_ctx_slot, memory)
    n_slots = fit.n_slots if fit else 0
    assert n_slots == 0 or PLAIN.needs(n_slots, n_ctx_slot) <= memory
    assert n_slots == 256 or PLAIN.needs(n_slots + 1, n_ctx_slot) > memory


def test_the_table_ends_where_the_training_did() -> None:
    assert contexts_of(PLAIN) == [2048, 4096, 8192]
    assert contexts_of(replace(PLAIN, n_ctx_train=10000)) == [2048, 4096, 8192, 10000]


LOG = """\
llama_context: n_ctx                 = 8192
llama_context: n_ubatch              = 512
load_tensors:   CPU_Mapped model buffer size =    92.10 MiB
llama_kv_cache: size = 1024.00 MiB (  8192 cells,  32 layers,  1/1 seqs), K (f16):  512.00 MiB, V (f16):  512.00 MiB
sched_reserve:        CPU compute buffer size =    16.27 MiB
load_model: initializing, n_slots = 1, n_ctx_slot = 8192, kv_unified = 'false'
"""


def test_a_log_is_compared_line_by_line() -> None:
    found = {one.what: one for one in compare(shape("llama", **KV_HEADS), int(92.1 * MIB), read_log(LOG.splitlines()))}
    assert {what for what, one in found.items() if one.differs} == set()
    assert found["KV cache"].computed_mib == 1024.0
    assert found["compute buffers"].computed_mib is None
    other = compare(shape("llama", 16, **KV_HEADS), int(92.1 * MIB), read_log(LOG.splitlines()))
    assert [one.what for one in other if one.differs] == ["KV cache"]


def test_an_allocation_scales_to_other_slots_and_contexts() -> None:
    size = logged_size(read_log(LOG.splitlines()))
    assert size == Logged(131072.0, 0.0)
    assert size is not None
    assert size(4, 4096) == 4 * 4096 * 131072


def written(tmp_path: Path, arch: str = "llama", **own: Any) -> Path:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf(model(arch, **{**KV_HEADS, **own}), bytes(1 << 20)))
    return path


def test_the_plan_names_the_largest_fit_and_its_flags(tmp_path: Path) -> None:
    plan = planned(PlanOptions(written(tmp_path), memory="2G", parallel=2))
    assert plan.fit is not None
    assert (plan.fit.n_slots, plan.fit.n_ctx_slot) == (2, 7936)
    assert "-np 2 -c 15872 --no-kv-unified --slots --metrics --slot-save-path DIR/" in plan.flags
    text = "\n".join(report_lines(plan))
    assert "The largest fit: 2 slots of 7,936 tokens take 1.94 GiB." in text
    assert "(2.00)" in text
    assert as_json(plan)["kv_bytes_per_token"]["f16"] == 131072
    assert plan.ok


def test_both_given_are_judged(tmp_path: Path) -> None:
    plan = planned(PlanOptions(written(tmp_path), memory="1G", parallel=4, ctx=8000, kv_type="q8_0,f16"))
    assert not plan.ok
    assert "What was asked for: 4 slots of 8,192 tokens take 3.06 GiB: 2.06 GiB too much." in report_lines(plan)
    assert "-ctk q8_0 -ctv f16" in plan.flags
    assert "-fa on" in planned(PlanOptions(written(tmp_path), kv_type="q8_0")).flags


def test_windows_are_planned_with_their_full_cache_unless_told_otherwise(tmp_path: Path) -> None:
    path = written(tmp_path, "gemma3", **{"attention.sliding_window": 512})
    assert "--swa-full" in planned(PlanOptions(path)).flags
    assert "--swa-full" not in planned(PlanOptions(path, swa_full=False)).flags


def test_an_unknown_architecture_has_no_plan_but_its_log_has(tmp_path: Path) -> None:
    path, log = written(tmp_path, "brand-new"), tmp_path / "server.log"
    plan = planned(PlanOptions(path, memory="2G"))
    assert (plan.ok, plan.fit, plan.model) == (False, None, None)
    assert "not known here" in report_lines(plan)[-1] or "not known here" in "".join(report_lines(plan)[-2:])
    log.write_text(LOG)
    plan = planned(PlanOptions(path, memory="2G", parallel=2, log=log))
    assert plan.fit is not None
    assert plan.fit.n_ctx_slot == 7936
    assert "taken from the engine's own allocation" in plan.notes[0]
    with pytest.raises(UsageError, match="the log is of K f16, V f16"):
        planned(PlanOptions(path, log=log, kv_type="q8_0"))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"memory": "lots"}, "--memory: a size such as 16G"),
        ({"memory": "0"}, "--memory"),
        ({"memory": "16"}, "got '16', which is 16 bytes"),
        ({"kv_type": "q9"}, "--kv-type: one or two of"),
        ({"kv_type": "f16,f16,f16"}, "--kv-type"),
        ({"parallel": 0}, "--parallel: a whole number"),
        ({"ctx": 0}, "--ctx: a whole number"),
        ({"log": Path("nowhere.log")}, "--log: cannot read"),
    ],
)
def test_wrong_options_are_one_line(tmp_path: Path, options: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        planned(PlanOptions(written(tmp_path), **options))


def test_a_file_that_is_no_model_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_text("hello there")
    with pytest.raises(UsageError, match="it is no GGUF model"):
        planned(PlanOptions(tmp_path / "m.gguf"))
    with pytest.raises(UsageError, match="cannot read the model"):
        planned(PlanOptions(tmp_path / "gone.gguf"))


def test_more_context_than_the_model_was_trained_on_is_told(tmp_path: Path) -> None:
    plan = planned(PlanOptions(written(tmp_path), memory="64G", parallel=2, ctx=16384))
    assert plan.notes[0].startswith("The model was trained on 8,192 tokens: llama-server gives a slot no more")
    assert "trained on" not in "".join(planned(PlanOptions(written(tmp_path), memory="64G", ctx=8192)).notes)


def test_a_log_of_another_model_is_told(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text(LOG)
    assert "is it the log of another model?" in planned(PlanOptions(written(tmp_path), log=log)).notes[0]
    log.write_text("print_info: arch             = qwen3\n" + LOG)
    with pytest.raises(UsageError, match="it tells of a model of qwen3"):
        planned(PlanOptions(written(tmp_path), log=log))


def test_what_is_not_modelled_makes_the_size_a_least_one(tmp_path: Path) -> None:
    plan = planned(PlanOptions(written(tmp_path, "rwkv7"), memory="2G"))
    assert any("take at least" in line for line in report_lines(plan))


def test_an_unknown_architecture_still_tells_its_window(tmp_path: Path) -> None:
    assert "trained on       8,192 tokens" in report_lines(planned(PlanOptions(written(tmp_path, "brand-new"))))


def test_a_part_whose_others_cannot_be_found_is_refused(tmp_path: Path) -> None:
    for name, number, why in (("m-00002-of-00002", 1, "part 2 of 2: give the first"), ("renamed", 0, "part 1 of 2")):
        split = {"split.no": number, "split.count": 2}
        (tmp_path / f"{name}.gguf").write_bytes(gguf({**model("llama", **KV_HEADS), **split}))
        with pytest.raises(UsageError, match=why):
            planned(PlanOptions(tmp_path / f"{name}.gguf"))


def test_weights_of_all_parts_count(tmp_path: Path) -> None:
    for part in (1, 2):
        raw = gguf(model("llama", **KV_HEADS), bytes(4096))
        (tmp_path / f"m-{part:05d}-of-00002.gguf").write_bytes(raw)
    assert planned(PlanOptions(tmp_path / "m-00001-of-00002.gguf")).weights_bytes == 8192
