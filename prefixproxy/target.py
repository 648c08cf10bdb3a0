"""What a request target leads to: one reading of the raw bytes, for routing, and what an upstream may read in them.

Servers differ in how they read a path. llama-server decodes %XX and %uXXXX before it looks for a route (cpp-httplib,
detail::decode_path; seen on build 11549) and changes nothing else; a reverse proxy before it may also merge slashes,
resolve dots, drop parameters or an ending slash. A target that any of them could take for a generating path has to wait
for a slot like one: taken for something else it would meet a slot that a pinned request is being sent to.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from urllib.parse import unquote

MOST_DECODINGS = 4
"""Nobody decodes twice on purpose; a chain of servers may."""

_ESCAPED_UTF16 = re.compile(r"%u([0-9a-fA-F]{4})")
_END_OF_PATH = re.compile(r"[?#\x00].*", re.DOTALL)


class PathReader:
    """Finds among `paths` the one that a target may mean."""

    def __init__(self, paths: Iterable[str]) -> None:
        self._paths = {_folded(path): path for path in paths}

    def meant(self, raw_path: bytes) -> str | None:
        """The path of ours that some server could read in `raw_path` (as it came, without its query), or None."""
        path = raw_path.decode("latin-1")
        for _ in range(MOST_DECODINGS):
            found = self._paths.get(_folded(path))
            if found is not None:
                return found
            path, before = _decoded(path), path
            if path == before:
                break
        return None


def _decoded(path: str) -> str:
    return unquote(_ESCAPED_UTF16.sub(lambda found: chr(int(found[1], 16)), path), errors="replace")


def _folded(path: str) -> str:
    """The path with everything gone that a server might overlook."""
    segments: list[str] = []
    for part in _END_OF_PATH.sub("", path).replace("\\", "/").split("/"):
        segment = part.partition(";")[0].strip().casefold()
        if segment == "..":
            del segments[-1:]
        elif segment not in ("", "."):
            segments.append(segment)
    return "/".join(segments)
