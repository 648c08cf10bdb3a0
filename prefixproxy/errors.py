"""What can go wrong, each with its HTTP meaning, and how each API spells an error.

ProxyError
├── BadRequest             400 invalid_json, invalid_request, invalid_target, invalid_encoding, invalid_setting
│                          400 reuse_off
│                          403 host_not_allowed · 404 not_found · 405 method_not_allowed · 413 body_too_large
│                          415 unsupported_encoding · 508 loop_detected
├── ContextLengthExceeded  400 context_length_exceeded (with n_prompt_tokens and n_ctx_slot)
├── InvalidApiKey          401 invalid_api_key
├── Rejected               429 queue_full · 503 queue_timeout (with Retry-After) · 400 tenant_limit
├── UpstreamUnavailable    503 upstream_unavailable (with Retry-After); UpstreamLoading, OtherKind
├── UpstreamFailed         502 upstream_error
└── UpstreamTimedOut       504 upstream_timeout
UsageError                 wrong settings or arguments; the command line prints it and exits with 2
"""

from __future__ import annotations

from math import ceil
from typing import Any

import orjson

from prefixproxy.types import API_OF_PATH, Api

_ANTHROPIC_TYPE = {
    400: "invalid_request_error",
    401: "authentication_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_OPENAI_TYPE = {
    401: "authentication_error",
    429: "rate_limit_error",
    502: "upstream_error",
    503: "unavailable_error",
    504: "upstream_error",
}


class UsageError(Exception):
    """A setting or an argument the user gave is wrong; the message is one line that says which and how to mend it."""


class ProxyError(Exception):
    """A request that this proxy itself answers. `retry_after_s` becomes the `Retry-After` header."""

    status = 500
    code = "internal_error"

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        status: int | None = None,
        retry_after_s: float | None = None,
        **details: int,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or self.code
        self.status = status or self.status
        self.retry_after_s = retry_after_s
        self.details = details

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Raw headers of the answer, without its length."""
        out = [(b"content-type", b"application/json")]
        if self.retry_after_s is not None:
            out.append((b"retry-after", str(max(1, ceil(self.retry_after_s))).encode()))
        return out

    def body(self, path: str) -> bytes:
        """The error as the API behind `path` spells it."""
        return orjson.dumps(self.envelope(path))

    def envelope(self, path: str) -> dict[str, Any]:
        """The error object: OpenAI's shape unless the path belongs to Anthropic's or Ollama's API."""
        api = API_OF_PATH.get(path)
        if path.startswith("/v1/messages"):
            kind = _ANTHROPIC_TYPE.get(self.status, "api_error")
            return {
                "type": "error",
                "error": {
                    "type": kind,
                    "message": self.message,
                    "code": self.code,
                    "source": "prefixproxy",
                    **self.details,
                },
            }
        if api in (Api.OLLAMA_CHAT, Api.OLLAMA_GENERATE) or path.startswith("/api/"):
            return {"error": self.message, "code": self.code, "source": "prefixproxy", **self.details}
        kind = _OPENAI_TYPE.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": None,
                "code": self.code,
                "source": "prefixproxy",
                **self.details,
            }
        }


class BadRequest(ProxyError):
    status = 400
    code = "invalid_request"


class ContextLengthExceeded(ProxyError):
    status = 400
    code = "context_length_exceeded"


class InvalidApiKey(ProxyError):
    status = 401
    code = "invalid_api_key"


class Rejected(ProxyError):
    status = 429
    code = "queue_full"


class UpstreamUnavailable(ProxyError):
    status = 503
    code = "upstream_unavailable"


class UpstreamLoading(UpstreamUnavailable):
    """It answers, so waiting a little may help."""


class OtherKind(UpstreamUnavailable):
    """It answers, but not like the kind of server it was taken for."""


class UpstreamFailed(ProxyError):
    status = 502
    code = "upstream_error"


class UpstreamTimedOut(ProxyError):
    status = 504
    code = "upstream_timeout"
