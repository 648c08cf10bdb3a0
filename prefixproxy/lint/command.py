"""`prefixproxy lint`: where request bodies break the cached prefix of the ones before, and what stabilising does."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from io import TextIOWrapper
from pathlib import Path

import orjson
from rich.console import Console

from prefixproxy.errors import UsageError
from prefixproxy.lint.compare import TokenCounter
from prefixproxy.lint.input import read_input
from prefixproxy.lint.report import Setup, examine
from prefixproxy.lint.show import as_json, print_report
from prefixproxy.plan import Mode
from prefixproxy.stabilise.notes import ENCODING, count_tokens
from prefixproxy.stabilise.stabiliser import Learned, StabilisePolicy
from prefixproxy.volatile.files import load_rules

STDIN = "-"
_NO_LIMIT_TOKENS = 1 << 40


@dataclass(frozen=True, slots=True)
class LintOptions:
    """What the command line and the settings say; the last five as in `[stabilise]`."""

    path: str | None = None
    json: bool = False
    strict: bool = False
    mode: Mode = "apply"
    learned: Learned = "suggest"
    rules: Sequence[str] = ()
    disabled: Sequence[str] = ()
    replay_limit: int = 64


def run(files: Sequence[str], options: LintOptions) -> int:
    """Lint these files, print the report, and return the exit code. Raises UsageError for what cannot be read."""
    extra = [(name, _rule_file(name)) for name in options.rules]
    found = read_input(_contents(files), options.path)
    rules = load_rules(extra, frozenset(options.disabled))
    count, tokenizer, note = usable_tokenizer()
    # without a tokenizer no note can be measured: a limit that no note reaches keeps the stabiliser from asking
    limit = options.replay_limit if count else _NO_LIMIT_TOKENS
    setup = Setup(rules, StabilisePolicy(learned=options.learned, replay_limit_tokens=limit), options.mode)
    report = examine(found.samples, setup, TokenCounter(count), tokenizer, note)
    report = replace(report, left_out=found.left_out)
    if options.json:
        sys.stdout.buffer.write(orjson.dumps(as_json(report), option=orjson.OPT_INDENT_2) + b"\n")
    else:
        if isinstance(sys.stdout, TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")
        console = Console(file=sys.stdout, highlight=False)
        print_report(report, console)
    return 1 if options.strict and not report.ok else 0


def usable_tokenizer(count: Callable[[str], int] = count_tokens) -> tuple[Callable[[str], int] | None, str, str]:
    """The tokenizer, its name, and what is odd about it."""
    try:
        count("probe")
    except (ImportError, LookupError, OSError, ValueError) as failure:
        return None, "bytes/4", f"tiktoken cannot be used ({failure}), so four bytes count as one token"
    return count, f"tiktoken {ENCODING.removesuffix('_offline')}", ""


def _contents(files: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    for name in files:
        try:
            yield ("stdin", sys.stdin.buffer.read()) if name == STDIN else (name, Path(name).read_bytes())
        except OSError as failure:
            raise UsageError(f"{name}: cannot read it: {failure.strerror or failure}") from None


def _rule_file(name: str) -> str:
    try:
        return Path(name).expanduser().read_text(encoding="utf-8")
    except OSError as failure:
        raise UsageError(f"{name}: cannot read the rule file: {failure.strerror or failure}") from None
    except UnicodeDecodeError as failure:
        raise UsageError(f"{name}: cannot read the rule file: {failure}") from None
