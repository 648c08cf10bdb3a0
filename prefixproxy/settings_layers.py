"""What the settings need of the world: TOML files and dotted overrides as nested tables, one laid over another, and
which addresses are this machine's own."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

from prefixproxy.errors import UsageError


def read_toml(path: Path) -> dict[str, Any]:
    """A settings file, its rule files as seen from where it stands. Raises UsageError."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: cannot read the settings file: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: not valid TOML: {error}") from None
    stabilise = values.get("stabilise")
    if isinstance(stabilise, dict) and isinstance(stabilise.get("rules"), list):
        stabilise["rules"] = [_beside(path, rule) for rule in stabilise["rules"]]
    return values


def _beside(path: Path, rule: Any) -> Any:
    return str(path.parent / Path(rule).expanduser()) if isinstance(rule, str) else rule


def nested(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys as tables within tables; a None is left out."""
    out: dict[str, Any] = {}
    for key, value in overrides.items():
        first, _, rest = key.partition(".")
        if rest:
            value = nested({rest: value})
        elif isinstance(value, Mapping):
            value = nested(value)
        if value is not None:
            out = merged(out, {first: value})
    return out


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Tables are merged key by key; anything else, lists included, replaces what is below."""
    out = dict(below)
    for key, value in above.items():
        under = out.get(key)
        out[key] = merged(under, value) if isinstance(under, Mapping) and isinstance(value, Mapping) else value
    return out


_ANY = ("0.0.0.0", "::")
_LONGEST_NAME = 63
_DEFAULT_PORTS = {"http": 80, "https": 443}


def is_own_address(url: str, host: str, port: int) -> bool:
    """Whether `url` plainly names the address a server listens on at `host` and `port`. Other names for it exist."""
    parts = urlsplit(url)
    if port == 0 or (parts.port or _DEFAULT_PORTS.get(parts.scheme)) != port:
        return False
    named = (parts.hostname or "").lower()
    if host in _ANY:
        return named in _ANY or is_loopback(named)
    return named == host.lower() or ("localhost" in (named, host.lower()) and is_loopback(named) and is_loopback(host))


def refuse_one_address(upstreams: Sequence[tuple[str, str]]) -> None:
    """Two upstreams (name and URL) that are one server would each take its slots for their own. Raises ValueError."""
    for number, (name, url) in enumerate(upstreams):
        for other, its_url in upstreams[:number]:
            if _is_one_address(urlsplit(url), urlsplit(its_url)):
                told = url if url == its_url else f"{its_url} and {url}"
                raise ValueError(f"upstreams: {other!r} and {name!r} are the same server ({told}): name it once")


def _is_one_address(one: SplitResult, other: SplitResult) -> bool:
    ports = [parts.port or _DEFAULT_PORTS.get(parts.scheme) for parts in (one, other)]
    hosts = [(parts.hostname or "").lower() for parts in (one, other)]
    same_host = hosts[0] == hosts[1] or ("localhost" in hosts and all(map(is_loopback, hosts)))
    return same_host and ports[0] == ports[1] and one.path.rstrip("/") == other.path.rstrip("/")


def names_of(urls: Sequence[str]) -> list[str]:
    """A name for each URL: its host and port, and its path where these are another's too."""
    parts = [urlsplit(url) for url in urls]
    hosts = Counter(part.netloc for part in parts)
    names = [part.netloc + (part.path.replace("/", ".") if hosts[part.netloc] > 1 else "") for part in parts]
    return [re.sub(r"[^\w.:-]+", "", name).strip("._:-")[:_LONGEST_NAME] for name in names]


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens there."""
    try:
        return host.lower() == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
