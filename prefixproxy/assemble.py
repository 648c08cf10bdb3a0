"""One JSON answer from the events of a stream: what llama-server would have sent without streaming, field for field.

Upstream requests always stream, because only a stream can be cancelled under load and only it shows the first token.
Sources: server-task.cpp (to_json_*), server-context.cpp (process_token, send_final_response), chat.cpp (diffs).

What a stream cannot give back is refused beforehand (`why_not`) or, where only the answer's end shows it, marked:
`Assembler.exact` is False when the last characters may have been held back and never sent. The server holds a token
back while its text ends inside a character or could still become a stop word, and forgets it if the limit comes first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from prefixproxy.assemble_typed import Messages, Responses, vanishes
from prefixproxy.errors import UpstreamFailed
from prefixproxy.prompt import Edit, SetKey, holds_tokens
from prefixproxy.types import PINNABLE, Api

ASSEMBLED = frozenset({Api.CHAT, Api.COMPLETIONS, Api.COMPLETION, Api.INFILL, Api.RESPONSES, Api.MESSAGES})
_TYPED = frozenset({Api.RESPONSES, Api.MESSAGES})

_NATIVE = frozenset({Api.COMPLETION, Api.INFILL})
_PROBABILITIES = ("n_probs", "logprobs", "top_logprobs")
_CHAT_KEYS = ("choices", "created", "model", "system_fingerprint", "object", "usage", "id", "timings")


def can_assemble(api: Api, body: Mapping[str, Any]) -> bool:
    """Whether the JSON answer to `body` can be put together from a stream exactly."""
    return why_not(api, body) is None


def why_not(api: Api, body: Mapping[str, Any]) -> str | None:
    """The reason to forward a request for JSON without streaming, None if there is none."""
    if api not in ASSEMBLED:
        return "the API is not llama-server's own or OpenAI's"
    if not _one_answer(api, body):
        return "a stream mixes several answers, and usage counts one of them"
    if any(body.get(key) for key in _PROBABILITIES):
        return "tokens that are held back lose their probabilities in a stream"
    if body.get("return_tokens"):
        return "tokens that are held back lose their ids in a stream"
    if api not in _NATIVE and body.get("verbose"):
        return "__verbose quotes the raw text, which a stream of parsed messages lacks"
    if body.get("n_indent"):
        return "a line with too little indentation is cut after it was sent"
    if body.get("reasoning_format") == "deepseek-legacy":
        return "this format leaves reasoning in the content of a stream, and out of it elsewhere"
    if not _plain_controls(body):
        return "the server has to refuse a control field of the wrong type"
    if (api is Api.CHAT or api in _TYPED) and _continues(api, body):
        return "a continued message is repeated whole without streaming, and only its new part in a stream"
    return None


def _continues(api: Api, body: Mapping[str, Any]) -> bool:
    messages = body.get("messages", body.get("input"))
    if body.get("continue_final_message") or not isinstance(messages, list):
        return bool(body.get("continue_final_message"))
    for message in reversed(messages):
        if not isinstance(message, dict):
            return False
        if message.get("role") == "assistant":
            return True
        if api is not Api.MESSAGES or not vanishes(message):
            return False
    return False


def _one_answer(api: Api, body: Mapping[str, Any]) -> bool:
    if any(body.get(key) not in (None, 1) for key in ("n", "n_cmpl")):
        return False
    prompt = body.get("prompt")
    if api is Api.CHAT or not isinstance(prompt, list) or len(prompt) == 1:
        return True
    return holds_tokens(prompt)


def _plain_controls(body: Mapping[str, Any]) -> bool:
    """Whether no field that we set ourselves has a value that the server would answer with an error."""
    options = body.get("stream_options")
    if options is not None and not isinstance(options, dict):
        return False
    switches = [body.get("stream"), body.get("return_progress"), body.get("timings_per_token")]
    switches.append((options or {}).get("include_usage"))
    return not body.get("stream") and all(switch is None or isinstance(switch, bool) for switch in switches)


def stream_body_edits(api: Api, body: Mapping[str, Any]) -> tuple[Edit, ...]:
    """What to change in a body that goes upstream as a stream: a client's own stream, or JSON if `can_assemble`."""
    return _progress_edits(api, body) if body.get("stream") else _json_edits(api, body)


def _json_edits(api: Api, body: Mapping[str, Any]) -> tuple[Edit, ...]:
    """What turns a request for JSON into one whose stream `Assembler` can read.

    The timings of every token tell whether the last text that came belongs to the last token.
    """
    if api is Api.MESSAGES:
        return (SetKey((), "stream", True),)  # it drops all else
    edits: list[Edit] = [SetKey((), "stream", True)]
    if not _tells_text_early(api, body):
        edits.append(SetKey((), "return_progress", True))
    if api is Api.CHAT:
        edits.append(SetKey((), "stream_options", {**(body.get("stream_options") or {}), "include_usage": True}))
    if api not in _NATIVE and api not in _TYPED:
        edits.append(SetKey((), "timings_per_token", True))
    return tuple(edits)


def _progress_edits(api: Api, body: Mapping[str, Any]) -> tuple[Edit, ...]:
    """Prefill progress, which `sse.ProgressFilter` removes again unless the client asked for it itself.

    It tells the reused tokens before the first one is generated, and lets the server notice during prefill that we are
    gone. With several prompts or an echoed message, progress would change more of the stream than it adds.
    """
    asked = body.get("return_progress")
    if api not in PINNABLE or asked not in (None, False) or not _one_answer(api, body) or body.get("echo"):
        return ()
    if _tells_text_early(api, body):
        return ()
    return (SetKey((), "return_progress", True),)


def _tells_text_early(api: Api, body: Mapping[str, Any]) -> bool:
    """Whether the first progress may bring the beginning of the answer: where a template opens the thought and that
    stays in the text, the parsed message is not empty before the first token (server-task.cpp, update_chat_msg). In
    chat `sse.ProgressFilter` puts it back in its place; in Responses it is spread over several events."""
    return api is Api.RESPONSES and body.get("reasoning_format") in ("none", "deepseek-legacy")


class _Parts(Protocol):
    """Collects one API's events."""

    def add(self, event: dict[str, Any]) -> None: ...

    def answer(self) -> tuple[dict[str, Any], bool] | None:
        """The body and whether it is exact; None while the last event is missing."""


class Assembler:
    """Feed it the JSON object of every event, then ask for the result."""

    def __init__(self, api: Api, body: Mapping[str, Any]) -> None:
        stops = bool(body.get("stop"))
        self._error: dict[str, Any] | None = None
        self._malformed = False
        self._parts: _Parts
        if api is Api.CHAT:
            self._parts = _Chat(stops)
        elif api is Api.COMPLETIONS:
            self._parts = _Completions(stops)
        elif api in _NATIVE:
            self._parts = _Native(stops)
        elif api is Api.RESPONSES:
            self._parts = Responses(
                _limit(body, "max_output_tokens", "max_completion_tokens", "max_tokens", "n_predict")
            )
        elif api is Api.MESSAGES:
            self._parts = Messages()
        else:
            raise ValueError(f"streams of {api} are not assembled")
        self.exact = True

    @property
    def beside(self) -> tuple[dict[str, Any], ...]:
        """Counts that the stream told and the JSON answer leaves out."""
        return (self._parts.timings,) if isinstance(self._parts, Responses) else ()

    @property
    def lacks_start(self) -> bool:
        """Whether it needs a `message_start` before `result`: the server left that event out, and ended well."""
        whole = self._error is None and not self._malformed
        return whole and isinstance(self._parts, Messages) and self._parts.lacks_start

    def feed(self, event: dict[str, Any]) -> None:
        """Take one event's object; an error ends the answer."""
        if self._error is not None:
            return
        if isinstance(event.get("error"), dict):
            self._error = event
            return
        try:
            self._parts.add(event)
        except (AttributeError, KeyError, TypeError):
            self._malformed = True

    def result(self) -> tuple[int, dict[str, Any]]:
        """Status and body: the whole answer, or the error that ended the stream with the status it would have had.

        Sets `exact`. Raises UpstreamFailed when the stream ended before the answer did, or was none.
        """
        if self._error is not None:
            code = self._error["error"].get("code")
            return code if isinstance(code, int) and 400 <= code <= 599 else 500, self._error
        found = None if self._malformed else self._found()
        if found is None:
            what = "sent an event of an unknown shape" if self._malformed else "ended its stream before the answer did"
            raise UpstreamFailed(f"the upstream {what}")
        body, self.exact = found
        return 200, body

    def _found(self) -> tuple[dict[str, Any], bool] | None:
        try:
            return self._parts.answer()
        except (AttributeError, KeyError, TypeError):
            self._malformed = True
            return None


class _Native:
    """/completion and /infill: texts, then one object with everything else."""

    def __init__(self, stops: bool) -> None:
        self._stops = stops
        self._texts: list[str] = []
        self._tokens_at_text: int | None = None
        self._final: dict[str, Any] | None = None

    def add(self, event: dict[str, Any]) -> None:
        if "prompt_progress" in event:
            return
        if event.get("stop") is False:
            self._texts.append(event.get("content") or "")
            self._tokens_at_text = event.get("tokens_predicted")
        else:
            # `response_fields` may have taken `stop` out of the last object, never out of the others.
            self._final = event

    def answer(self) -> tuple[dict[str, Any], bool] | None:
        if self._final is None:
            return None
        body = dict(self._final)
        if "content" in body:
            body["content"] = "".join(self._texts) + body["content"]
        if isinstance(settings := body.get("generation_settings"), dict):
            body["generation_settings"] = {**settings, "stream": False}
        if "generation_settings/stream" in body:
            body["generation_settings/stream"] = False
        at_limit = body.get("stop_type", "limit") == "limit"
        predicted = body.get("tokens_predicted", _predicted(body))
        held = self._stops and at_limit and self._texts[-1:] == [""]
        return body, not held and predicted in (None, self._tokens_at_text)


class _Completions:
    """/v1/completions: chunks with a text, the last one with everything else."""

    def __init__(self, stops: bool) -> None:
        self._stops = stops
        self._texts: list[str] = []
        self._tokens_at_text: int | None = None
        self._final: dict[str, Any] | None = None

    def add(self, event: dict[str, Any]) -> None:
        choice = _choice(event)
        if choice is None or "prompt_progress" in event:
            return
        self._texts.append(choice.get("text") or "")
        if choice.get("finish_reason") is None:
            self._tokens_at_text = _predicted(event)
        else:
            self._final = event

    def answer(self) -> tuple[dict[str, Any], bool] | None:
        choice = _choice(self._final) if self._final is not None else None
        if self._final is None or choice is None:
            return None
        body = {**self._final, "choices": [{**choice, "text": "".join(self._texts)}]}
        held = self._stops and choice["finish_reason"] == "length" and self._texts[-2:-1] == [""]
        return body, not held and _predicted(body) in (None, self._tokens_at_text)


class _Chat:
    """/v1/chat/completions: role, differences of the parsed message, the end, and usage in a chunk of its own."""

    def __init__(self, stops: bool) -> None:
        self._stops = stops
        self._message: dict[str, Any] = {}
        self._texts: dict[str, list[str]] = {}
        self._calls: dict[int, dict[str, Any]] = {}
        self._tokens_at_text: int | None = None
        self._choice: dict[str, Any] | None = None
        self._last: dict[str, Any] = {}

    def add(self, event: dict[str, Any]) -> None:
        # Progress may bring text: what the template opened the answer with, where reasoning stays in it.
        self._last = event
        choice = _choice(event)
        if choice is None:
            return
        self._add_delta(choice.get("delta") or {})
        if choice.get("finish_reason") is not None:
            self._choice = choice
        elif (predicted := _predicted(event)) is not None:
            self._tokens_at_text = predicted

    def _add_delta(self, delta: dict[str, Any]) -> None:
        for key, value in delta.items():
            if key == "tool_calls":
                for call in value:
                    self._add_call(call)
            elif isinstance(value, str) and key != "role":
                self._texts.setdefault(key, []).append(value)
            elif value is not None:
                self._message[key] = value

    def _add_call(self, delta: dict[str, Any]) -> None:
        """A changed name or id comes whole, arguments come as what is added (chat.cpp, compute_diffs)."""
        empty = {"type": "function", "function": {"name": "", "arguments": ""}}
        call = self._calls.setdefault(delta["index"], empty)
        for key, value in delta.items():
            if key not in ("index", "function"):
                call[key] = value
        function = delta.get("function") or {}
        call["function"]["arguments"] += function.get("arguments") or ""
        for key, value in function.items():
            if key != "arguments":
                call["function"][key] = value

    def answer(self) -> tuple[dict[str, Any], bool] | None:
        if self._choice is None:
            return None
        choice = {k: v for k, v in self._choice.items() if k != "delta"} | {"message": self._whole_message()}
        found = {**self._last, "object": "chat.completion", "choices": [choice]}
        body = {key: found[key] for key in _CHAT_KEYS if key in found} | found
        return body, self._exact(body)

    def _whole_message(self) -> dict[str, Any]:
        texts = {key: "".join(parts) for key, parts in self._texts.items()}
        message = {"role": self._message.get("role", "assistant"), "content": texts.pop("content", "")}
        message |= {key: text for key, text in texts.items() if text}
        message |= {key: value for key, value in self._message.items() if key != "role"}
        calls = [self._calls[index] for index in sorted(self._calls)]
        return message | ({"tool_calls": calls} if calls else {})

    def _exact(self, body: dict[str, Any]) -> bool:
        """Of a message parsed to nothing the server quotes the raw text, which is surely empty only if the model ended
        at once. At the token limit, the last token must have shown."""
        predicted, finish = _predicted(body), body["choices"][0]["finish_reason"]
        if not (any(self._texts.values()) or self._calls):
            return predicted in (None, 1) and finish == "stop" and not self._stops
        return finish != "length" or predicted in (None, self._tokens_at_text)


def _limit(body: Mapping[str, Any], *names: str) -> int | None:
    """The most tokens asked for, the strictest of several names; None without any."""
    asked = [body[name] for name in names if isinstance(body.get(name), int) and body[name] >= 0]
    return min(asked, default=None)


def _choice(event: dict[str, Any]) -> dict[str, Any] | None:
    choices = event.get("choices")
    return choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else None


def _predicted(event: dict[str, Any]) -> int | None:
    """How many tokens were generated when the event was written, if it says."""
    timings = event.get("timings")
    return timings.get("predicted_n") if isinstance(timings, dict) else None
