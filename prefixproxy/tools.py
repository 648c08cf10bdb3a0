"""Tool lists as they were first seen: the same tools are sent in the same bytes and order, whatever a client shuffles.

Two tools are the same if their JSON is equal, the order of keys and of `required` aside. The order of `properties`
and `enum` values steers a model (llama.cpp#6215), so nothing is ever sorted: it is the first seen that is sent again.
A tool that differs in anything else goes as its client wrote it.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from hashlib import blake2b
from typing import Any

import orjson

from prefixproxy.body import json_text
from prefixproxy.prompt import Edit, Prompt, SetValue, Tool
from prefixproxy.tool_order import refers_to_positions

_EXACT_BELOW = 2**63
"""orjson reads integers beyond 64 bits as floats: a float of that size may be such an integer, rounded."""
_MAX_MEANINGS = 8192
_DATA_KEYS = frozenset({"default", "const", "enum", "example", "examples"})
"""Under these a schema holds values, not schemas: a `required` in there is no set."""
_NAME_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Under these the keys are names somebody chose, not words of JSON Schema."""


class ToolMemory:
    """Remembers, per model and `key`, each tool's first bytes and each set's first order; least recently used out.

    `max_sets` bounds the orders kept, `max_bytes` the JSON of the tools kept and the names in those orders.
    """

    def __init__(self, max_sets: int, max_bytes: int) -> None:
        self._max_sets = max_sets
        self._max_bytes = max_bytes
        self._tools: OrderedDict[tuple[str, str], bytes] = OrderedDict()
        self._orders: OrderedDict[tuple[str, frozenset[str]], tuple[str, ...]] = OrderedDict()
        self._meanings: OrderedDict[bytes, str] = OrderedDict()
        self._n_bytes = 0
        self.revision = 0
        """Moves whenever there is something new to keep."""

    @property
    def n_bytes(self) -> int:
        """What `max_bytes` bounds."""
        return self._n_bytes

    def apply(self, prompt: Prompt, key: bytes = b"") -> tuple[Edit, ...]:
        """The edits that give this prompt's tools the bytes and the order first seen, and remember what is new.

        `key` keeps apart what should not learn from each other, for instance the digest of a head. A list whose
        order is spoken of, or with a name twice, keeps its order.
        """
        if not prompt.tools:
            return ()
        scope = blake2b(prompt.model.encode("utf-8", "surrogatepass") + b"\0" + key, digest_size=16).hexdigest()
        own = [json_text(tool.spec).encode() for tool in prompt.tools]
        meanings = [self._meaning(spelled, tool) for spelled, tool in zip(own, prompt.tools, strict=True)]
        first = [self._first(scope, m, spelled) for m, spelled in zip(meanings, own, strict=True)]
        order = self._order(scope, prompt) if all(meanings) else None
        self._shrink()
        if order is not None:
            return (SetValue(prompt.tools_path, raw=b"[" + b",".join(first[i] for i in order) + b"]"),)
        pairs = zip(prompt.tools, own, first, strict=True)
        return tuple(SetValue(tool.path, raw=b) for tool, a, b in pairs if a != b)

    def copy(self) -> ToolMemory:
        """A memory that knows the same, and learns by itself."""
        other = ToolMemory(self._max_sets, self._max_bytes)
        other._tools, other._orders = self._tools.copy(), self._orders.copy()
        other._meanings, other._n_bytes = self._meanings.copy(), self._n_bytes
        return other

    def export(self) -> dict[str, Any]:
        """All that is remembered, as JSON, oldest first."""
        return {
            "tools": [[*key, spelled.decode()] for key, spelled in self._tools.items()],
            "orders": [[scope, list(order)] for (scope, _), order in self._orders.items()],
        }

    def load(self, exported: Any) -> None:
        """Take over what `export` gave. ValueError: it did not."""
        try:
            tools = {(str(s), str(m)): str(spelled).encode() for s, m, spelled in exported["tools"]}
            orders = [(str(scope), tuple(map(str, order))) for scope, order in exported["orders"]]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError("not an export of tools") from error
        for tool_key, spelled in tools.items():
            self._keep_tool(tool_key, spelled)
        for scope, order in orders:
            self._keep_order(scope, order)
        self._shrink()

    def _meaning(self, spelled: bytes, tool: Tool) -> str:
        """A digest that equal tools share; "" for a tool that cannot be compared."""
        exact = blake2b(spelled, digest_size=16).digest()
        known = self._meanings.get(exact)
        if known is None:
            known = self._meanings[exact] = meaning_of(tool.spec)
            if len(self._meanings) > _MAX_MEANINGS:
                self._meanings.popitem(last=False)
        self._meanings.move_to_end(exact)
        return known

    def _first(self, scope: str, meaning: str, spelled: bytes) -> bytes:
        if not meaning:
            return spelled
        return self._keep_tool((scope, meaning), spelled)

    def _keep_tool(self, key: tuple[str, str], spelled: bytes) -> bytes:
        if key not in self._tools:
            self._tools[key] = spelled
            self._n_bytes += len(spelled)
            self.revision += 1
        self._tools.move_to_end(key)
        return self._tools[key]

    def _keep_order(self, scope: str, order: tuple[str, ...]) -> None:
        key = scope, frozenset(order)
        if key not in self._orders:
            self._orders[key] = order
            self._n_bytes += sum(map(len, order))
            self.revision += 1
        self._orders.move_to_end(key)

    def _order(self, scope: str, prompt: Prompt) -> list[int] | None:
        """The tools' positions in the order to send; None for the client's own."""
        names = [tool.name for tool in prompt.tools]
        place = {name: i for i, name in enumerate(names)}
        if len(place) < len(names):
            return None
        known = self._nearest(scope, frozenset(names))
        order = [name for name in known if name in place]
        kept = set(order)
        order += [name for name in names if name not in kept]
        if order != names and refers_to_positions(prompt):
            return None
        self._keep_order(scope, tuple(order))
        return [place[name] for name in order] if order != names else None

    def _nearest(self, scope: str, names: frozenset[str]) -> tuple[str, ...]:
        """The order of the known set this one is, or grew or shrank from: the one with the most names in common.
        A set that did both must have kept at least half."""
        if (scope, names) in self._orders:
            return self._orders[scope, names]
        best = (0, 0)
        order: tuple[str, ...] = ()
        for (other_scope, other), known in reversed(self._orders.items()):
            shared = len(other & names) if other_scope == scope else 0
            related = shared == len(other) or shared == len(names) or 2 * shared >= max(len(other), len(names))
            if related and (shared, -len(other)) > best:
                best, order = (shared, -len(other)), known
        return order

    def _shrink(self) -> None:
        while len(self._orders) > self._max_sets:
            self._forget_order()
        while self._n_bytes > self._max_bytes:
            if self._tools:
                self._n_bytes -= len(self._tools.popitem(last=False)[1])
            else:
                self._forget_order()

    def _forget_order(self) -> None:
        self._n_bytes -= sum(map(len, self._orders.popitem(last=False)[1]))


def meaning_of(spec: Any) -> str:
    """Hex digest of a tool's meaning; "" where two spellings could not be told apart (numbers beyond 64 bits)."""
    try:
        meaning = _schema(spec)
    except (_Incomparable, RecursionError):
        return ""
    try:
        spelled = orjson.dumps(meaning, option=orjson.OPT_SORT_KEYS)
    except orjson.JSONEncodeError:
        spelled = json.dumps(meaning, sort_keys=True).encode()
    return blake2b(spelled, digest_size=16).hexdigest()


class _Incomparable(Exception):
    pass


def _schema(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        if key in _NAME_MAPS:
            return {name: _schema(v) for name, v in value.items()}
        return {k: _data(v) if k in _DATA_KEYS else _schema(v, k) for k, v in value.items()}
    if isinstance(value, list):
        if key == "required" and all(isinstance(v, str) for v in value):
            return sorted(value)
        return [_schema(v) for v in value]
    return _data(value)


def _data(value: Any) -> Any:
    """A value as it is, if it can be compared."""
    if isinstance(value, dict):
        return {k: _data(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_data(v) for v in value]
    if isinstance(value, float) and not -_EXACT_BELOW < value < _EXACT_BELOW:
        raise _Incomparable
    return value
