"""Behind several answers of one token each llama-server still has a copy between slots to do, and does it over whatever
was restored meanwhile. On the real engine: what is restored answers as if it were evaluated anew."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from pathlib import Path
from unittest.mock import Mock

import httpx
import pytest
from running_engine import RunningEngine
from running_proxy import running_proxy, until_quiet

from prefixproxy.backends.llamacpp import LlamaServer
from prefixproxy.schedule.types import Decode, Restore, Save
from prefixproxy.slotwork import SlotWork
from prefixproxy.types import RootId, SlotId

pytestmark = [pytest.mark.anyio, pytest.mark.engine, pytest.mark.timeout(300)]

ROOT = " ".join(f"Rule {n}: shelf {n * 7 % 23}." for n in range(120))
OTHER = " ".join(f"Thing {n}: box {n * 5 % 19}." for n in range(150))
FILE, ID = "root.bin", RootId("root")


async def answer(server: LlamaServer, slot: int, *, reuse: bool = True) -> tuple[int, list[tuple[int, float]]]:
    """Tokens found in the slot; and each token of the answer with its log-probability."""
    body = {
        "prompt": f"{ROOT} Which?",
        "id_slot": slot,
        "cache_prompt": reuse,
        "n_predict": 4,
        "temperature": 0,
        "n_probs": 1,
    }
    said = await server.call("POST", "/completion", body)
    return said["timings"]["cache_n"], [(each["id"], each["logprob"]) for each in said["completion_probabilities"]]


async def test_a_root_restored_behind_them_is_that_root(
    engine_factory: Callable[..., RunningEngine], tiny_models: Callable[[str], Path]
) -> None:
    engine = engine_factory(model=tiny_models("attentive"), parallel=2, ctx=2 * 4096)
    server, watch = LlamaServer("u", engine.url), Mock()
    work = SlotWork(watch, Mock(), lambda name: "m")
    try:
        _, expected = await answer(server, 0, reuse=False)
        await server.call("POST", "/completion", {"prompt": ROOT, "id_slot": 0, "n_predict": 0})
        assert await work.save(server, Save(ID, SlotId("u", 0), FILE))
        for slot in (0, 1):
            several = {"messages": [{"role": "user", "content": f"{OTHER} {slot}"}], "n": 2, "max_tokens": 1}
            await server.call("POST", "/v1/chat/completions", several)
            assert await work.decode(server, Decode(SlotId("u", slot)))
            assert await work.restore(server, Restore(ID, SlotId("u", slot), FILE))
            found, got = await answer(server, slot)
            assert found > 500
            assert [token for token, _ in got] == [token for token, _ in expected]
            assert [logprob for _, logprob in got] == pytest.approx([logprob for _, logprob in expected], abs=0.02)
    finally:
        await server.close()
    assert watch.tried.call_count == 2


async def test_the_proxy_has_a_token_decoded_behind_them(engine_factory: Callable[..., RunningEngine]) -> None:
    engine = engine_factory(parallel=2, ctx=2 * 4096)
    async with running_proxy(engine.url) as running, httpx.AsyncClient(timeout=120) as client:
        several = {"messages": [{"role": "user", "content": OTHER}], "n": 2, "max_tokens": 1}
        answer = await client.post(f"{running.url}/v1/chat/completions", json=several)
        assert answer.status_code == 200, answer.text
        await until_quiet(running)
        slots = (await client.get(f"{engine.url}/slots")).json()
    assert 1 in [slot["n_prompt_tokens"] for slot in slots]


async def test_a_body_of_several_prompts_does_not_spoil_its_own_answers(
    engine_factory: Callable[..., RunningEngine], tiny_models: Callable[[str], Path]
) -> None:
    """The second prompt may get a slot that the first one's copy is still to come to, and what the RAM cache has for
    it. Which slot that is depends on the one used last."""
    engine = engine_factory(model=tiny_models("attentive"), parallel=2, ctx=2 * 4096)
    body = {"max_tokens": 1, "temperature": 0, "logprobs": 5}

    async with running_proxy(engine.url) as running, httpx.AsyncClient(timeout=120) as client:

        async def first_tokens(**more: object) -> list[dict[str, float]]:
            answer = await client.post(f"{running.url}/v1/completions", json={**body, **more})
            assert answer.status_code == 200, answer.text
            choices = sorted(answer.json()["choices"], key=lambda choice: int(choice["index"]))
            tops = [choice["logprobs"]["content"][0]["top_logprobs"] for choice in choices]
            return [{one["token"]: one["logprob"] for one in top} for top in tops]

        prompts = [f"{OTHER} Which?", f"{ROOT} Where?"]
        alone = [(await first_tokens(prompt=prompt, cache_prompt=False))[0] for prompt in prompts]
        got = []
        for others in (["One"], ["Two", "Three"], ["Four"], ["Five", "Six"]):
            for prompt in (f"{ROOT} Who?", *others):
                await first_tokens(prompt=prompt)
            got.append(await first_tokens(prompt=prompts, n=2))
    assert [len(each) for each in got] == [4] * 4
    for each, wanted in zip(chain.from_iterable(got), [alone[0], alone[0], alone[1], alone[1]] * 4, strict=True):
        same = each.keys() & wanted.keys()  # of another prompt none is; the last of them may change places
        assert len(same) >= 3
        assert [each[token] for token in same] == pytest.approx([wanted[token] for token in same], abs=0.05)
