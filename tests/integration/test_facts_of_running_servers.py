"""The facts of real servers: the embedded engine by its URL, by its own log, and behind the proxy."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest
from running_engine import RunningEngine
from running_proxy import running_proxy
from scripted_ollama import ScriptedOllama
from stub_upstream import Exchange, StubUpstream

from prefixproxy import __version__
from prefixproxy.backends.llamacpp import LlamaServer
from prefixproxy.errors import UpstreamUnavailable
from prefixproxy.facts.flags import read_flags
from prefixproxy.facts.gather import gather, gather_engine
from prefixproxy.types import TemplateFacts

pytestmark = pytest.mark.anyio


async def test_an_engine_tells_what_it_was_given_and_what_it_made_of_it(
    engine_factory: Callable[..., RunningEngine],
) -> None:
    one = engine_factory(parallel=6, ctx=8192, extra={"verbosity": 4, "cache_type_k": 30, "cpuparams.n_threads": 1})
    facts = await gather_engine(one.engine, one.settings)
    assert (facts.n_slots, facts.n_ctx_slot, facts.kv_unified) == (6, 1536, False)
    assert facts.kv_types == ("bf16", "f16")
    assert facts.flash_attention in ("on", "off")
    assert facts.build == one.engine.build
    assert facts.flags is not None
    assert facts.flags[2:6] == ("-np", "6", "-c", "8192")


async def test_a_url_alone_tells_less_and_leaves_no_trace(engine_factory: Callable[..., RunningEngine]) -> None:
    one = engine_factory(parallel=2, ctx=2048)
    facts = await gather(one.url)
    assert (facts.kind, facts.n_slots, facts.n_ctx_slot) == ("llama-server", 2, 1024)
    assert facts.tokens == "reported by the server"
    assert (facts.kv_types, facts.flags, facts.through) == (None, None, "")
    async with httpx.AsyncClient() as client:
        assert all("n_prompt_tokens" not in slot for slot in (await client.get(f"{one.url}/slots")).json())


async def test_a_command_line_tells_a_probe_what_no_answer_does() -> None:
    async with StubUpstream() as stub:
        for argv, told in (
            ((), (("f16", "f16"), True, 8192)),
            (("-ctk", "q8_0", "--no-cache-prompt", "--cache-ram", "0"), (("q8_0", "f16"), False, 0)),
        ):
            server = LlamaServer("local", stub.url, flags=lambda argv=argv: read_flags(argv))  # type: ignore[misc]
            facts = await server.probe()
            await server.close()
            assert (facts.kv_types, facts.reuses_unasked, facts.ram_mib) == told
        server = LlamaServer("local", stub.url)
        facts = await server.probe()
        await server.close()
        assert (facts.kv_types, facts.reuses_unasked, facts.ram_mib) == (None, None, 8192)


async def test_a_log_of_another_run_is_not_believed(engine: RunningEngine) -> None:
    line = "load_model: initializing, n_slots = 9, n_ctx_slot = 512, kv_unified = 'true'"
    assert (await gather(engine.url, log=[line])).kv_unified is None
    line = "load_model: initializing, n_slots = 4, n_ctx_slot = 4096, kv_unified = 'false'"
    assert (await gather(engine.url, log=[line])).kv_unified is False


async def test_behind_the_proxy_it_is_the_upstream_that_counts(engine: RunningEngine) -> None:
    async with running_proxy(engine.url) as running:
        facts = await gather(running.url)
    assert (facts.url, facts.n_slots, facts.through) == (engine.url, 4, __version__)


@pytest.mark.parametrize(
    ("version", "tokens"), [("0.33.3", "reported by the server"), ("0.31.0", "inferred, as this version does not")]
)
async def test_ollama_says_who_counts_the_tokens(version: str, tokens: str) -> None:
    async with ScriptedOllama(version) as ollama:
        facts = await gather(ollama.url)
    assert (facts.kind, facts.build) == ("ollama", version)
    assert facts.tokens.startswith(tokens)


async def test_nothing_there_is_an_error_in_words() -> None:
    with pytest.raises(UpstreamUnavailable, match="cannot be reached"):
        await gather("http://127.0.0.1:9")


async def test_a_template_shows_how_it_opens_a_chat_that_the_user_begins_and_whether_it_renders_tools(
    engine_factory: Callable[..., RunningEngine],
) -> None:
    one = engine_factory(parallel=1, ctx=1024)
    server = LlamaServer("local", one.url)
    facts, again = await server.probe(), await server.probe()
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    plain = (await server.call("POST", "/apply-template", chat))["prompt"]
    with_tools = (await server.call("POST", "/apply-template", {**chat, "tools": [tool]}))["prompt"]
    await server.close()
    assert facts.template.opening
    assert plain.startswith(facts.template.opening + "Hi")
    assert (facts.template.shows_tools, plain != with_tools) == (False, False)
    assert again.template == facts.template


async def test_a_template_that_renders_tools_says_so() -> None:
    async with StubUpstream() as stub:
        server = LlamaServer("local", stub.url)
        facts = await server.probe()
        await server.close()
    assert facts.template == TemplateFacts(opening="", shows_tools=True)


@pytest.mark.parametrize("refused", ["system", "tools"])
async def test_a_template_that_refuses_some_chats_is_taken_to_render_tools(refused: str) -> None:
    async def render(exchange: Exchange) -> None:
        body = exchange.request.json()
        if refused in (*body, *(message["role"] for message in body["messages"])):
            await exchange.json(500, {"error": f"no {refused}"})
        else:
            await exchange.json(200, {"prompt": f"Answer: {body['messages'][-1]['content']}"})

    async with StubUpstream() as stub:
        stub.routes["/apply-template"] = render
        server = LlamaServer("local", stub.url)
        facts = await server.probe()
        await server.close()
    assert facts.template == TemplateFacts(opening="Answer: ", shows_tools=True)


@pytest.mark.parametrize(
    ("status", "answer"), [(500, {"error": "no such role"}), (200, ["?"]), (200, {"prompt": None})]
)
async def test_of_a_template_that_refuses_everything_nothing_is_known(status: int, answer: object) -> None:
    async def refuse(exchange: Exchange) -> None:
        await exchange.json(status, answer)

    async with StubUpstream() as stub:
        stub.routes["/apply-template"] = refuse
        server = LlamaServer("local", stub.url)
        facts = await server.probe()
        await server.close()
        assert facts.template == TemplateFacts()
