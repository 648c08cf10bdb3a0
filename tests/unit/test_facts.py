"""The head of every report: what is unknown is said, what may be compared, flags and startup logs as they are read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from prefixproxy.facts.flags import MASK, read_flags
from prefixproxy.facts.log import KvAllocation, read_log
from prefixproxy.facts.process import flags_of, flags_of_children
from prefixproxy.facts.report import RunFacts, comparable, fact_lines, facts_json

NOTHING = RunFacts("http://a", "llama-server")
KNOWN = RunFacts(
    "http://a",
    "llama-server",
    build="b11434",
    model="tiny",
    n_slots=4,
    n_ctx_slot=4096,
    kv_unified=False,
    kv_type_k="f16",
    kv_type_v="q8_0",
    flash_attention="on",
    flags=("-np", "4", "-c", "16384"),
    tokens="reported by the server",
    told_by={"kv_type_k": "startup log"},
)
LOG = """\
0.00.002.317 I srv          init: build_info: b11434-abc
0.00.004.049 I srv    load_model: loading model '/models/tiny.gguf'
0.00.862.248 I print_info: arch                  = llama
0.00.862.767 I print_info: n_swa                 = 0
0.00.875.944 I load_tensors:   CPU_Mapped model buffer size =    92.10 MiB
0.00.886.835 I llama_context: n_seq_max             = 6
0.00.886.914 I llama_context: n_ctx                 = 9216
0.00.887.036 I llama_context: flash_attn            = auto
0.00.888.401 I llama_kv_cache:        CPU KV buffer size =   202.50 MiB
0.01.089.468 I llama_kv_cache: size =  202.50 MiB (  1536 cells,  30 layers,  6/6 seqs), K (f16):  101.25 MiB, \
V (f16):  101.25 MiB
0.01.096.435 I resolve_fused_ops: Flash Attention enabled
0.01.102.879 I sched_reserve:        CPU compute buffer size =    16.27 MiB
0.01.309.839 I srv    load_model: initializing, n_slots = 6, n_ctx_slot = 1536, kv_unified = 'false'
0.01.310.891 I srv    load_model: prompt cache is enabled, size limit: 8192 MiB
0.01.310.963 I srv          init: idle slots will be saved to prompt cache upon starting a new task
0.01.320.142 I srv          init: model loaded
"""


def test_what_is_unknown_is_said_for_every_fact() -> None:
    lines = fact_lines(NOTHING)
    assert [line.split()[0] for line in lines] == [
        "server",
        "build",
        "model",
        "slots",
        "n_ctx_slot",
        "KV",
        "flash",
        "flags",
        "tokens",
    ]
    assert sum("unknown" in line for line in lines) == len(lines) - 1
    assert facts_json(NOTHING)["kv_type_k"] is None


def test_what_is_known_is_shown_with_where_it_comes_from() -> None:
    text = "\n".join(fact_lines(KNOWN))
    assert "K f16, V q8_0 (startup log); unified: no" in text
    assert "-np 4 -c 16384" in text
    assert "unknown" not in text
    assert facts_json(KNOWN)["n_ctx_slot"] == 4096


def test_runs_are_compared_on_equal_context_and_cache_types_only() -> None:
    other = replace(KNOWN, url="http://b")
    assert comparable(KNOWN, other).ok
    smaller = comparable(KNOWN, replace(other, n_ctx_slot=1536))
    assert not smaller.ok
    assert smaller.reason == "n_ctx_slot: 4,096 on http://a, 1,536 on http://b"
    coarser = comparable(KNOWN, replace(other, kv_type_k="q8_0"))
    assert coarser.differs == ("KV types: K f16, V q8_0 on http://a, K q8_0, V q8_0 on http://b",)


def test_what_cannot_be_told_is_no_equality() -> None:
    found = comparable(KNOWN, replace(NOTHING, url="http://b"))
    assert (found.ok, found.differs) == (False, ())
    assert found.unknown == ("n_ctx_slot is unknown on http://b", "KV types are unknown on http://b")


def test_a_server_is_comparable_to_itself_whatever_it_does_not_tell() -> None:
    assert comparable(NOTHING, replace(NOTHING, through="0.1.0")).ok
    assert not comparable(NOTHING, replace(NOTHING, build="another")).ok


def test_flags_are_read_with_their_aliases_and_the_last_one_counts() -> None:
    argv = "-m m.gguf --parallel 2 -np 6 -c=8192 --no-kv-unified -cram -1 -ctk q8_0 -fa --swa-full --api-key hush"
    flags = read_flags(argv.split())
    assert (flags.n_parallel, flags.ctx, flags.unified, flags.ram_mib) == (6, 8192, False, -1)
    assert (flags.type_k, flags.type_v, flags.flash_attention, flags.swa_full) == ("q8_0", None, "on", True)
    assert flags.argv[-1] == MASK
    assert "hush" not in str(flags)


@pytest.mark.parametrize(
    ("argv", "unified"),
    [("", True), ("--no-kv-unified", True), ("-np 4", False), ("-np 4 -kvu", True), ("-np -1", True)],
)
def test_without_a_number_of_slots_the_pool_is_unified(argv: str, unified: bool) -> None:
    assert read_flags(argv.split()).unified is unified


@pytest.mark.parametrize(
    ("argv", "clears"),
    [
        ("", True),
        ("-np 4 -kvu", True),
        ("-np 4", False),
        ("-kvu --no-cache-idle-slots", False),
        ("-np 4 -kvu --cache-ram 0", False),
    ],
)
def test_idle_slots_are_cleared_where_they_share_a_pool_and_go_to_the_ram_cache(argv: str, *, clears: bool) -> None:
    assert read_flags(argv.split()).clears_idle is clears


def test_a_flag_wins_over_its_variable() -> None:
    environment = {"LLAMA_ARG_CACHE_RAM": "0", "LLAMA_ARG_N_PARALLEL": "4", "LLAMA_ARG_KV_UNIFIED": "true"}
    flags = read_flags(["-np", "2"], environment)
    assert (flags.n_parallel, flags.ram_mib, flags.unified) == (2, 0, True)


def test_a_startup_log_tells_what_was_made_of_the_flags() -> None:
    told = read_log(LOG.splitlines())
    assert (told.build, told.n_slots, told.n_ctx_slot, told.kv_unified) == ("b11434-abc", 6, 1536, False)
    assert told.kv == [KvAllocation(202.5, 1536, 30, 6, 6, "f16", 101.25, "f16", 101.25)]
    assert told.kv[0].bytes_per_token == 30 * 2 * 192 * 2
    assert (told.flash_attention, told.ram_cache_mib, told.keeps_idle_slots) == ("on", 8192, True)
    assert (told.weights_mib, told.compute_mib) == ({"CPU_Mapped": 92.1}, {"CPU": 16.27})


def test_a_log_of_several_starts_tells_of_the_last() -> None:
    later = LOG.replace("n_slots = 6, n_ctx_slot = 1536", "n_slots = 2, n_ctx_slot = 4608").replace(
        "8192 MiB", "99 MiB"
    )
    told = read_log((LOG + later).splitlines())
    assert (told.n_slots, told.ram_cache_mib, len(told.kv)) == (2, 99, 1)


def test_a_log_of_something_else_tells_nothing() -> None:
    assert not read_log(["hello", ""]).told


def listening(proc: Path, pid: str, port: int, cmdline: str, environment: str = "") -> None:
    """A process table in which this process listens on this port of loopback."""
    row = f"0: 0100007F:{port:04X} 00000000:0000 0A 00000000:00000000 00:00000000 00000000 1000 0 4242 1\n"
    (proc / "net").mkdir(parents=True, exist_ok=True)
    (proc / "net/tcp").write_text("  sl  local_address\n" + row)
    (proc / pid / "fd").mkdir(parents=True)
    (proc / pid / "fd" / "7").symlink_to("socket:[4242]")
    (proc / pid / "cmdline").write_bytes(cmdline.replace(" ", "\0").encode() + b"\0")
    (proc / pid / "environ").write_bytes(environment.replace(" ", "\0").encode() + b"\0")


def test_the_flags_are_those_of_the_process_that_listens(tmp_path: Path) -> None:
    listening(tmp_path, "17", 8080, "/usr/bin/llama-server -np 4 -c 8192", "LLAMA_ARG_CACHE_RAM=0 SECRET=x")
    found = flags_of("http://127.0.0.1:8080", tmp_path)
    assert found is not None
    assert (found.n_parallel, found.ram_mib) == (4, 0)
    assert flags_of("http://127.0.0.1:8081", tmp_path) is None
    assert flags_of("http://elsewhere:8080", tmp_path) is None


def test_another_program_on_the_port_has_no_flags_of_ours(tmp_path: Path) -> None:
    listening(tmp_path, "17", 8080, "/usr/bin/docker-proxy -np 4")
    assert flags_of("http://127.0.0.1:8080", tmp_path) is None


def test_the_flags_of_an_ollama_are_those_of_its_one_child(tmp_path: Path) -> None:
    child = "/usr/lib/ollama/llama-server --model m --no-webui --offline -c 16384 -np 4 --cache-type-k q8_0"
    listening(tmp_path, "17", 40000, child)
    found = flags_of_children("http://localhost:11434", tmp_path)
    assert found is not None
    assert (found.n_parallel, found.type_k) == (4, "q8_0")
    listening(tmp_path, "18", 40001, child)
    assert flags_of_children("http://localhost:11434", tmp_path) is None
