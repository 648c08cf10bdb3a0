"""The page at `/prefixproxy/`: its files put together into one response that loads nothing else and may load nothing.

The policy names the hashes of the one style and the one script, so that text from a prompt that got into the page as
markup would still not run; `require-trusted-types-for` makes the browser refuse to read text as markup at all.
"""

from __future__ import annotations

from base64 import b64encode
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib.resources import files

SCRIPTS = (
    "dom.js",
    "api.js",
    "format.js",
    "store.js",
    "charts.js",
    "timeline.js",
    "tables.js",
    "microscope.js",
    "picking.js",
    "admission.js",
    "main.js",
)
"""In this order they become one script; each uses only what stands in those before it."""
STYLE, SCRIPT = "/*STYLE*/", "/*SCRIPT*/"


@dataclass(frozen=True, slots=True)
class Page:
    """The response: its body and its headers."""

    body: bytes
    headers: dict[str, str]


@cache
def load_page() -> Page:
    """Put together once per process."""
    folder = files("prefixproxy").joinpath("page")

    def read(name: str) -> str:
        return folder.joinpath(name).read_text(encoding="utf-8")

    return assemble(read("index.html"), read("page.css"), [read(name) for name in SCRIPTS])


def assemble(html: str, css: str, scripts: list[str]) -> Page:
    """One page: the style and the scripts put in place of their marks. The scripts share one scope, and nothing of it
    is visible outside."""
    script = "(() => {\n'use strict';\n" + "\n".join(scripts) + "})();\n"
    for text, end in ((css, "</style"), (script, "</script")):
        if end in text.lower():
            raise ValueError(f"{end} would end the element it stands in")
    body = html.replace(STYLE, css, 1).replace(SCRIPT, script, 1).encode()
    headers = {
        "content-type": "text/html; charset=utf-8",
        "content-security-policy": policy(css, script),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
        "etag": f'"{sha256(body).hexdigest()[:32]}"',
    }
    return Page(body, headers)


def policy(css: str, script: str) -> str:
    """Only this style and this script, requests only to where the page came from, and nobody may frame it."""
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {_source(script)}",
            f"style-src {_source(css)}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    )


def _source(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
