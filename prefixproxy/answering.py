"""Relays one upstream answer to one client: a stream as it comes, or assembled for a client that wants JSON.

Bytes of a stream go through untouched; nothing in them is parsed but the first events, while progress reports that we
asked for are taken out, and the last, which carry the counts.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import orjson

from prefixproxy.assemble import ASSEMBLED, Assembler
from prefixproxy.assemble_typed import StartLeftOut, lacks_start, start_left_out
from prefixproxy.backends import Answer, UpstreamResponse
from prefixproxy.backends.http import end_to_end
from prefixproxy.body import Body
from prefixproxy.errors import BadRequest, ProxyError, UpstreamFailed
from prefixproxy.exchange import Exchange
from prefixproxy.intake import IDENTITY, OUR_HEADERS, decode_body, decoded, without
from prefixproxy.lease import Lease
from prefixproxy.lines import LineWatch, message_in, object_in
from prefixproxy.outcomes import outcome_of_answer
from prefixproxy.patience.names import ResponseNames
from prefixproxy.patience.splice import Splice, splice_of
from prefixproxy.reply import STREAM_HEADERS, Reply
from prefixproxy.sse import ProgressFilter, SSEOverflow, SSEReader, StreamTail, WholeEvents, is_error, object_of
from prefixproxy.types import Api, Outcome, Usage
from prefixproxy.usage import usage_from

MAX_ANSWER_BYTES = 256 << 20
MAX_KEPT_BYTES = 1 << 20

Headers = list[tuple[bytes, bytes]]

log = logging.getLogger(__name__)

_STREAM_DROPS = frozenset({b"content-length", b"content-encoding", b"cache-control", b"x-accel-buffering"})


Finish = Callable[[], Awaitable[None]]
"""What is left to do for the client once the slot has been given back."""


class Answering:
    """One answer on its way. `first_token` is called once, when the prefill is known to be over; `progress_is_ours`
    says that the client did not ask for the progress events in the stream."""

    def __init__(
        self,
        exchange: Exchange,
        body: Body,
        reply: Reply,
        lease: Lease,
        clock: Callable[[], float],
        first_token: Callable[[Lease], None],
        progress_is_ours: bool,
        names: ResponseNames,
    ) -> None:
        self._exchange = exchange
        self._body = body
        self._reply = reply
        self._lease = lease
        self._clock = clock
        self._tell_first_token = first_token
        self._names = names
        self._progress: ProgressFilter | LineWatch = ProgressFilter(exchange.api, remove=progress_is_ours)
        self._tail = StreamTail()
        self._response: UpstreamResponse | None = None
        self.generated = False
        """Something of the answer came; prefill progress is none of it."""
        self.said: dict[str, Any] | None = None
        """The whole answer in the shape of a JSON one, as far as it could be read."""

    async def relay(self, response: UpstreamResponse) -> Finish:
        """Relay an event stream as such or assembled, anything else (errors above all) as it is. The slot is done
        with when this returns; what the client still has to get is the returned call's business."""
        self._describe()
        self._response = response
        headers = end_to_end(response.headers)
        kind = next((v for k, v in headers if k.lower() == b"content-type"), b"")
        lines = b"x-ndjson" in kind
        if lines:
            self._progress = LineWatch()
        try:
            if not (lines or b"event-stream" in kind) or response.status != 200:
                finish = await self._relay_plain(response, headers)
            elif self._exchange.streaming or lines:
                finish = await self._relay_stream(response, headers)
            else:
                finish = await self._relay_assembled(response, headers)
        finally:
            if not self._lease.idle:
                self._learn_what_was_told()
        self._lease.usage = self._exchange.usage
        return finish

    async def _relay_stream(self, response: UpstreamResponse, headers: Headers) -> Finish:
        progress, tail, kept = self._progress, self._tail, _Kept()
        whole = WholeEvents((b"\n",)) if isinstance(progress, LineWatch) else WholeEvents()
        await self._reply.start(response.status, [*without(headers, _STREAM_DROPS), *STREAM_HEADERS])
        joined = _Joined(splice_of(self._exchange.api, self._exchange.id, self._names) if self._reply.early else None)
        async for chunk in _stream_of(response, headers):
            tail.feed(chunk)
            out = joined.feed(whole.feed(progress.feed(chunk)))
            if progress.first_token_seen:
                self._first_token()
                await self._reply.first_token()
            if out:
                kept.add(out)
                await self._reply.body(out)
        rest, last = joined.feed(whole.close() + progress.close()) + joined.close(), tail.last_objects()
        failed = any(is_error(each) for each in last[-1:])
        if not failed and not tail.ended(self._exchange.api):
            raise UpstreamFailed("the upstream ended its stream before the answer did")
        if lacks_start(self._exchange.api, last) and self._lease.native and not failed:
            start = await self._start_left_out()
            last[:0] = [start.event] if start.counted else []
        self._learn(last)
        if failed:
            self._exchange.outcome, self._lease.ok = Outcome.UPSTREAM_ERROR, False

        async def finish() -> None:
            await self._reply.end(rest)
            self.said = kept.assembled(self._exchange.api, self._body.data)

        return finish

    async def _relay_assembled(self, response: UpstreamResponse, headers: Headers) -> Finish:
        """A client that wants JSON gets what the server would have said without streaming."""
        reader, assembler = SSEReader(), Assembler(self._exchange.api, self._body.data)
        async for chunk in _stream_of(response, headers):
            _feed(assembler, reader, self._progress.feed(chunk))
            if self._progress.first_token_seen:
                self._first_token()
        _feed(assembler, reader, self._progress.close())
        start = await self._start_left_out() if assembler.lacks_start else None
        if start is not None:
            assembler.feed(start.event)
        started = self._clock()
        status, body = assembler.result()
        counted = start is None or start.counted
        self._learn([body, *assembler.beside] if counted else [])
        payload = orjson.dumps(body)
        self._exchange.times.own_s += self._clock() - started
        if not (assembler.exact and counted):
            self._mark_inexact()
        if status == 200:
            self.said = body
            self._count()
        else:
            self._exchange.outcome = outcome_of_answer(status)
        return partial(self._reply.whole, status, _as_json(headers), payload)

    async def _relay_plain(self, response: UpstreamResponse, headers: Headers) -> Finish:
        """The body as it is. Its length header, if it has one, stays right: not a byte is changed."""
        parts, size = [], 0
        self.generated = response.status == 200
        async for chunk in response.chunks():
            parts.append(chunk)
            size += len(chunk)
            if size > MAX_ANSWER_BYTES:
                raise UpstreamFailed(f"the upstream's answer is larger than {MAX_ANSWER_BYTES} bytes")
        body = b"".join(parts)
        self._lease.idle = True
        answers = _answers_in(body, headers)
        self._exchange.outcome = outcome_of_answer(response.status, is_answer=bool(answers))
        if self._exchange.outcome is Outcome.OK:
            self._lease.ok = True
            self._exchange.usage = self._usage_of(answers[-1:])
            if len(answers) == 1:
                api = self._exchange.api
                self.said = answers[0] if api in ASSEMBLED else message_in(api, answers)
            self._count()
        return partial(self._reply.whole, response.status, without(headers, frozenset({b"content-length"})), body)

    async def _start_left_out(self) -> StartLeftOut:
        """The beginning of an answer in Messages that came without one, its prompt counted anew."""
        lease, planned = self._lease, self._exchange.planned()
        total = None
        try:
            total = await lease.backend.count_tokens(Api.MESSAGES, planned.body.data, planned.rendered())
        except (ProxyError, KeyError, TypeError, ValueError) as failure:
            log.debug("the prompt of %s was not counted: %s", self._exchange.id, failure)
        reused = lease.seen_reused if lease.reuses_unasked else 0
        return start_left_out(f"chatcmpl-{self._exchange.id}", lease.model, total, reused, lease.ticket.n_tokens)

    def _mark_inexact(self) -> None:
        """The server may have held back a few last characters that a stream never shows: half a character, or what
        could have become a stop word, at the token limit. Asking again would cost the whole answer. Or nobody could
        say any more what part of its prompt was reused."""
        self._reply.more[OUR_HEADERS + b"assembled"] = b"inexact"
        log.info("request %s: its answer may lack what the server kept to itself", self._exchange.id)

    def _learn(self, objects: list[dict[str, Any]]) -> None:
        """The stream ended by itself: the slot is idle, and the last events say what it cost."""
        self._lease.ok = self._lease.idle = True
        self._exchange.usage = self._lease.usage = self._usage_of(objects)

    def _usage_of(self, objects: list[dict[str, Any]]) -> Usage:
        """What the answer cost, as this kind of server means its counts."""
        exchange, lease = self._exchange, self._lease
        counted = self._response.counted if self._response else None
        api, body, last = (
            (counted.api, counted.body, counted.last) if counted else (exchange.api, self._body.data, objects)
        )
        answer = Answer(api, body, last, usage_from(api, last), lease.ticket.n_tokens, lease.alone)
        reading = lease.backend.interpret(answer)
        exchange.truncated = lease.truncated = reading.truncated
        return reading.usage

    def _learn_what_was_told(self) -> None:
        """It broke off. The server counts the prompt as far as it came, so we do: see `lease.CutShort`."""
        told, progress = self._tail.last_objects(), self._progress.progress
        if progress is not None:
            counts = {"total": progress.total, "cache": progress.cached, "processed": progress.processed}
            told.insert(0, {"prompt_progress": counts})
        usage = self._exchange.usage = usage_from(self._exchange.api, told)
        if usage.evaluated_tokens is None:
            self._lease.reused = usage.cached_tokens

    def _first_token(self) -> None:
        self.generated = True
        if self._exchange.times.first_token is None:
            self._exchange.times.first_token = self._clock()
            self._tell_first_token(self._lease)

    def _describe(self) -> None:
        """Our headers, as far as they are known when the answer starts."""
        exchange = self._exchange
        more = self._reply.more
        if self._lease.slot is not None:
            more[OUR_HEADERS + b"slot"] = str(self._lease.slot).encode()
        more[OUR_HEADERS + b"family"] = exchange.planned().family.encode()
        more[OUR_HEADERS + b"expected-cached"] = str(self._lease.expected_cached).encode()
        more[OUR_HEADERS + b"queue-ms"] = b"%.1f" % (exchange.times.queue_s * 1e3)
        timing = b"queue;dur=%.1f, overhead;dur=%.1f" % (exchange.times.queue_s * 1e3, exchange.times.own_s * 1e3)
        more[b"server-timing"] = timing

    def _count(self) -> None:
        """The counts, on answers whose head can still carry them."""
        usage = self._exchange.usage
        for name, tokens in ((b"cache-n", usage.cached_tokens), (b"prompt-n", usage.evaluated_tokens)):
            if tokens is not None:
                self._reply.more[OUR_HEADERS + name] = str(tokens).encode()
        times = self._exchange.times
        upstream_s = self._clock() - times.arrived - times.queue_s - times.own_s
        self._reply.more[b"server-timing"] += b", upstream;dur=%.1f" % (max(0.0, upstream_s) * 1e3)


class _Joined:
    """A stream behind an answer that was begun for it, or as it is."""

    def __init__(self, splice: Splice | None) -> None:
        self._splice = splice

    def feed(self, chunk: bytes) -> bytes:
        if self._splice is None:
            return chunk
        try:
            return self._splice.feed(chunk)
        except SSEOverflow as failure:
            raise UpstreamFailed(str(failure)) from failure

    def close(self) -> bytes:
        return self._splice.close() if self._splice else b""


class _Kept:
    """A stream's bytes, up to a bound, to be read once the client has them: what was said is of use later, never
    worth a token's delay."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0

    def add(self, chunk: bytes) -> None:
        self._size += len(chunk)
        if self._size <= MAX_KEPT_BYTES:
            self._parts.append(chunk)
        else:
            self._parts.clear()

    def assembled(self, api: Api, data: dict[str, Any]) -> dict[str, Any] | None:
        """The stream as one JSON answer; None if it was too long, broke off, or is of an API that is not assembled."""
        if self._parts and api in (Api.OLLAMA_CHAT, Api.OLLAMA_GENERATE):
            objects = [object_in(line) for line in b"".join(self._parts).split(b"\n")]
            return message_in(api, [value for value in objects if value is not None])
        if not self._parts or api not in ASSEMBLED:
            return None
        assembler = Assembler(api, data)
        try:
            _feed(assembler, SSEReader(), b"".join(self._parts))
            return assembler.result()[1]
        except UpstreamFailed:
            log.debug("a stream could not be read as one answer")
            return None


def _feed(assembler: Assembler, reader: SSEReader, chunk: bytes) -> None:
    try:
        events = reader.feed(chunk)
    except SSEOverflow as failure:
        raise UpstreamFailed(str(failure)) from failure
    for event in events:
        value = object_of(event)
        if value is not None:
            assembler.feed(value)


def _stream_of(response: UpstreamResponse, headers: Headers) -> AsyncIterator[bytes]:
    """The stream's bytes as its writer meant them; no encoding was asked for, and next to no server uses one."""
    coding = _coding_of(headers)
    return response.chunks() if coding in IDENTITY else decoded(response.chunks(), coding)


def _answers_in(body: bytes, headers: Headers) -> list[dict[str, Any]]:
    """The JSON object that a whole body is, or those in its list: llama-server's own API answers so to several prompts,
    and to `n` above 1. Nothing, if it is neither."""
    try:
        answer = orjson.loads(decode_body(body, _coding_of(headers), MAX_ANSWER_BYTES))
    except (orjson.JSONDecodeError, BadRequest):
        return []
    answers = answer if isinstance(answer, list) else [answer]
    return answers if all(isinstance(one, dict) for one in answers) else []


def _coding_of(headers: Headers) -> str:
    return b",".join(value for name, value in headers if name == b"content-encoding").decode("latin-1").strip().lower()


def _as_json(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    kept = without(headers, _STREAM_DROPS | {b"content-type"})
    return [*kept, (b"content-type", b"application/json; charset=utf-8")]
