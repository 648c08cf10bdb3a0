"""Tool-call arguments as the server produced them: a client that spells them anew is put right, byte for byte.

Clients parse the arguments and write them again (compact, keys sorted, escapes changed), and the prompt then leaves
the KV cache at that call. The produced string is sent instead, where the same id comes with the same value.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator
from hashlib import blake2b
from math import isfinite
from typing import Any, NoReturn

from prefixproxy.prompt import Edit, Prompt, SetText

_ENTRY_BYTES = 200
"""What an entry costs beside its strings, roughly."""


class AnswerMemory:
    """The arguments produced under each tool-call id; at most `max_calls` and `max_bytes`, least recently used out.

    Servers use short ids again ("call_0"), so one id may hold several values, each with its own spelling.
    """

    def __init__(self, max_calls: int, max_bytes: int) -> None:
        self._max_calls = max_calls
        self._max_bytes = max_bytes
        self._calls: OrderedDict[tuple[str, str, bytes], str] = OrderedDict()
        self._known: dict[tuple[str, str], int] = {}
        self._n_bytes = 0
        self.revision = 0
        """Moves whenever there is something new to keep."""

    @property
    def n_bytes(self) -> int:
        """What `max_bytes` bounds."""
        return self._n_bytes

    def learn(self, tool_call_id: str, name: str, arguments: str) -> None:
        """Remember what the server produced. Arguments that are no JSON, or have a key twice, are not remembered."""
        value = value_of(arguments)
        if value is None:
            return
        key = tool_call_id, name, value
        if key in self._calls:
            self._n_bytes -= self._cost(key)
        else:
            self._known[key[:2]] = self._known.get(key[:2], 0) + 1
        self._calls[key] = arguments
        self.revision += 1
        self._calls.move_to_end(key)
        self._n_bytes += self._cost(key)
        while len(self._calls) > self._max_calls or self._n_bytes > self._max_bytes:
            self._forget(next(iter(self._calls)))

    def apply(self, prompt: Prompt) -> tuple[Edit, ...]:
        """The edits that put the produced arguments back, for calls of the same id, name and value."""
        edits = []
        for call in prompt.tool_calls:
            if (call.id, call.name) not in self._known:
                continue
            key = call.id, call.name, value_of(call.arguments) or b""
            produced = self._calls.get(key)
            if produced is None:
                continue
            self._calls.move_to_end(key)
            if produced != call.arguments:
                edits.append(SetText(call.arguments_path, produced))
        return tuple(edits)

    def export(self) -> list[list[str]]:
        """All that is remembered, as JSON, oldest first."""
        return [[ident, name, arguments] for (ident, name, _), arguments in self._calls.items()]

    def load(self, exported: Any) -> None:
        """Take over what `export` gave. ValueError: it did not."""
        try:
            calls = [(str(ident), str(name), str(arguments)) for ident, name, arguments in exported]
        except (TypeError, ValueError) as error:
            raise ValueError("not an export of answers") from error
        for call in calls:
            self.learn(*call)

    def _cost(self, key: tuple[str, str, bytes]) -> int:
        return _ENTRY_BYTES + sum(len(text.encode("utf-8", "surrogatepass")) for text in (*key[:2], self._calls[key]))

    def _forget(self, key: tuple[str, str, bytes]) -> None:
        self._n_bytes -= self._cost(key)
        del self._calls[key]
        self._known[key[:2]] -= 1
        if not self._known[key[:2]]:
            del self._known[key[:2]]


class _Incomparable(Exception):
    pass


def _refuse(_: str) -> NoReturn:
    raise _Incomparable


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise _Incomparable
    return value


def _float(digits: str) -> float:
    value = float(digits)
    if not isfinite(value):
        raise _Incomparable
    return value


_READER = json.JSONDecoder(object_pairs_hook=_object, parse_float=_float, parse_constant=_refuse)


def value_of(arguments: str) -> bytes | None:
    """A digest that two spellings of one JSON value share (1, 1.0 and true are three values); None where no two
    spellings may be taken for each other: no JSON, a key twice, a number that is none."""
    try:
        value = json.dumps(_READER.decode(arguments), sort_keys=True)
    except (_Incomparable, ValueError, RecursionError):
        return None
    return blake2b(value.encode(), digest_size=16).digest()


def message_of(said: dict[str, Any] | None) -> dict[str, Any] | None:
    """The assistant message of a chat answer."""
    choices = said.get("choices") if said else None
    first = choices[0] if isinstance(choices, list) and choices else None
    message = first.get("message") if isinstance(first, dict) else None
    return message if isinstance(message, dict) else None


def tool_calls_of(message: dict[str, Any] | None) -> Iterator[tuple[str, str, str]]:
    """Id, name and arguments of each tool call, as far as they are there."""
    calls = message.get("tool_calls") if message else None
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            yield str(call.get("id")), str(function.get("name")), function["arguments"]
