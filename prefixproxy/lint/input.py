"""Request bodies out of files: one object, a list of them, or JSON Lines; each alone, beside the path it goes to, or in
a record of an exported journal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from prefixproxy.body import Body, json_bytes, parse_json
from prefixproxy.chat import parse_prompt
from prefixproxy.errors import BadRequest, UsageError
from prefixproxy.prompt import Prompt
from prefixproxy.types import API_OF_PATH, Api

_PROMPT_KEYS = ("messages", "input", "instructions", "prompt", "input_prefix", "input_suffix")
_OLLAMA_KEYS = ("options", "keep_alive")
_JOURNAL_KEYS = frozenset({"miss_reason", "cache_source", "prompt_n"})


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One request body. `number` counts from 1 through all input, `source` is its file and `place` where it stood in
    it ("" for a file of one body); `guessed`: nobody named its API."""

    number: int
    source: str
    place: str
    api: Api
    guessed: bool
    body: Body
    prompt: Prompt


@dataclass(frozen=True, slots=True)
class Input:
    """What was read. `left_out`: journal records without a body that lint could compare."""

    samples: list[Sample]
    left_out: int = 0


def read_input(sources: Iterable[tuple[str, bytes]], path: str | None) -> Input:
    """Every body of these (name, content) pairs, in order; `path` is where those go that do not say. An export of the
    journal has its requests in the order in which they ended: here they come in that of their arrival.

    UsageError names the place of the first thing that is no body.
    """
    default = None if path is None else _api_of(path, "--path")
    out: list[Sample] = []
    left_out, export = 0, ""
    for name, raw in sources:
        found = list(_values(name, raw))
        if found and all(_is_record(value) for _, value in found):
            found.sort(key=lambda each: _arrival(each[1]))
        for place, value in found:
            try:
                if not _is_record(value) or "body" in value:
                    out.append(_sample(len(out) + 1, name, place, value, default))
                    continue
            except UsageError:
                if not _is_record(value):
                    raise
            left_out, export = left_out + 1, export or name
    if not out and left_out:
        raise UsageError(f"{export}: {NO_TEXT}")
    if not out:
        raise UsageError("there is no request body in these files")
    return Input(out, left_out)


NO_TEXT = (
    "is a journal export whose records hold no prompt text, only sizes and positions; set journal.store_text = true, "
    "restart the proxy, let the requests come again and export once more, or give lint the bodies that clients send"
)


def _is_record(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() >= _JOURNAL_KEYS


def _arrival(record: Mapping[str, Any]) -> float:
    time = record.get("time")
    return float(time) if isinstance(time, int | float) else inf


def guess_api(body: Mapping[str, Any]) -> Api | None:
    """The API whose shape a body has, None if it has none."""
    ollama = any(key in body for key in _OLLAMA_KEYS)
    if "messages" in body:
        if ollama:
            return Api.OLLAMA_CHAT
        return Api.MESSAGES if _is_anthropic(body) else Api.CHAT
    if "input" in body or "instructions" in body:
        return Api.RESPONSES
    if "input_prefix" in body or "input_suffix" in body:
        return Api.INFILL
    if "prompt" not in body:
        return None
    if ollama or "system" in body or "raw" in body or "context" in body:
        return Api.OLLAMA_GENERATE
    return Api.COMPLETION if "n_predict" in body or "cache_prompt" in body else Api.COMPLETIONS


def _is_anthropic(body: Mapping[str, Any]) -> bool:
    if "system" in body or "anthropic_version" in body:
        return True
    tools, messages = body.get("tools"), body.get("messages")
    if isinstance(tools, list) and any(isinstance(tool, dict) and "input_schema" in tool for tool in tools):
        return True
    contents = [m.get("content") for m in messages if isinstance(m, dict)] if isinstance(messages, list) else []
    blocks = [block for content in contents if isinstance(content, list) for block in content]
    return any(isinstance(block, dict) and block.get("type") in ("tool_use", "tool_result") for block in blocks)


def _values(name: str, raw: bytes) -> Iterator[tuple[str, Any]]:
    """Every value that should be a request, with its place in the file."""
    if not raw.strip():
        raise UsageError(f"{name}: is empty")
    lines = [(number, line) for number, line in enumerate(raw.split(b"\n"), 1) if line.strip()]
    try:
        whole = parse_json(raw)
    except BadRequest as error:
        if len(lines) < 2 or not _is_json(lines[0][1]):
            raise UsageError(f"{name}: {_why(error)}") from None
        for number, line in lines:
            yield from _unpacked(f"line {number}", _line(f"{name} line {number}", line))
    else:
        yield from _unpacked("", whole)


def _line(place: str, line: bytes) -> Any:
    try:
        return parse_json(line)
    except BadRequest as error:
        raise UsageError(f"{place}: {_why(error).replace('(line 1, ', '(')}") from None


def _is_json(line: bytes) -> bool:
    try:
        parse_json(line)
    except BadRequest:
        return False
    return True


def _why(error: BadRequest) -> str:
    return error.message.removeprefix("The body ")


def _unpacked(place: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and isinstance(value.get("requests"), list) and not _has_prompt(value):
        value = value["requests"]
    if isinstance(value, list):
        yield from ((f"{place} item {number}".lstrip(), item) for number, item in enumerate(value, 1))
    else:
        yield place, value


def _has_prompt(value: Mapping[str, Any]) -> bool:
    return any(key in value for key in _PROMPT_KEYS)


def _sample(number: int, name: str, place: str, value: Any, default: Api | None) -> Sample:
    where = f"{name} {place}".rstrip()
    if not isinstance(value, dict):
        raise UsageError(f"{where}: is no JSON object, so it is no request body")
    named = default
    if "body" in value and not _has_prompt(value):
        if value.get("path") is not None:
            named = _api_of(value["path"], f"{where}: path")
        value = value["body"]
        if not isinstance(value, dict):
            raise UsageError(f"{where}: body: is no JSON object")
    api = named or guess_api(value)
    if api is None:
        keys = ", ".join(sorted(map(str, value))[:8]) or "none"
        raise UsageError(f"{where}: is no request body that lint knows: no messages, input or prompt (keys: {keys})")
    body, prompt = _read(api, value, where)
    if prompt is None:
        said = "looks like" if named is None else "should be"
        raise UsageError(f"{where}: {said} a body of the {api.value} API, but its prompt is not understood")
    return Sample(number, name, place, api, named is None, body, prompt)


def _read(api: Api, value: dict[str, Any], where: str) -> tuple[Body, Prompt | None]:
    try:
        body = Body(json_bytes(value), value)
    except RecursionError:
        raise UsageError(f"{where}: is nested too deep") from None
    return body, parse_prompt(api, body)


def _api_of(path: Any, whose: str) -> Api:
    api = API_OF_PATH.get(path.partition("?")[0]) if isinstance(path, str) else None
    if api is None:
        raise UsageError(f"{whose}: {path!r} is none of {', '.join(API_OF_PATH)}")
    return api
