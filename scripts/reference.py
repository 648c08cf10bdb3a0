"""Write the pages of docs/reference that are made from the code: settings.md and rules.md.

tests/test_docs.py fails while a page differs from what this would write (`make docs`).
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from prefixproxy.settings import Settings
from prefixproxy.settings_errors import inner_model

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "docs" / "reference"
GENERATED = "<!-- Written by `make docs` from {source}; edit that, not this page. -->\n"

SETTINGS_HEAD = """# Settings

Stronger wins: command line, environment, settings file, defaults.

- **File**: `--config FILE`, else `./prefixproxy.toml`, else the packaged `config/default.toml`: the defaults.
- **Environment**: `PREFIXPROXY_` + section + `__` + name, such as `PREFIXPROXY_SERVER__PORT=8101`. Lists are JSON, or
  words with commas between them; `PREFIXPROXY_UPSTREAMS` is a JSON list of tables and replaces the file's. An empty
  variable counts as not set.
- **Unknown keys and wrong types** are errors that name the key; the command exits with 2.

The files under `config/` are commented examples: `default.toml`, `llama-server.toml`, `ollama.toml`, `team.toml`.
"""

RULES_HEAD = """# Built-in rules

What the stabiliser knows to be volatile. `[stabilise] disabled = ["name"]` switches a rule off, `rules = ["mine.toml"]`
adds files of your own. *Treatment*: `move` puts the text behind the shared root, as a note in a user message; `strip`
drops it, which only text that is no prompt text at all gets. *Evidence*: `signature` acts at first sight; `labelled` at
first sight on the first or last line of the head, elsewhere once the value was seen to change; `observed` only once it
was seen to change.
"""


def settings_reference() -> str:
    """docs/reference/settings.md."""
    out = [GENERATED.format(source="prefixproxy/settings.py"), SETTINGS_HEAD]
    for name, field in Settings.model_fields.items():
        section = inner_model(field.annotation)
        if section is None:
            raise TypeError(f"{name} is not a section")
        title = f"`[{name}]`" if field.annotation is section else f"`[[{name}]]`"
        out.append(f"\n## {title}\n\n{section.__doc__}\n\n| setting | type | default | |\n| --- | --- | --- | --- |\n")
        out += [_setting_row(leaf, info) for leaf, info in section.model_fields.items()]
    return "".join(out)


def rules_reference() -> str:
    """docs/reference/rules.md."""
    out = [GENERATED.format(source="prefixproxy/rules/*.toml"), RULES_HEAD]
    for path in sorted((ROOT / "prefixproxy" / "rules").glob("*.toml")):
        rules = tomllib.loads(path.read_text(encoding="utf-8")).get("rule", [])
        if rules:
            out.append(f"\n## {path.name}\n\n| rule | framework | treatment | evidence | why |\n")
            out.append("| --- | --- | --- | --- | --- |\n")
            out += [_rule_row(rule) for rule in rules]
    return "".join(out)


def _rule_row(rule: dict[str, Any]) -> str:
    framework = rule.get("framework", "any")
    cells = (f"`{rule['name']}`", framework, rule["treatment"], rule["evidence"], rule["why"])
    return "| " + " | ".join(_cell(cell) for cell in cells) + " |\n"


def _setting_row(name: str, field: FieldInfo) -> str:
    default = "required" if field.is_required() else f"`{_spelled(field.get_default(call_default_factory=True))}`"
    return f"| `{name}` | {_type(field)} | {default} | {_cell(field.description or '')} |\n"


def _type(field: FieldInfo) -> str:
    annotation = field.annotation
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(annotation))
    names = {str: "text", int: "whole number", float: "number", bool: "true or false"}
    if isinstance(annotation, type) and annotation in names:
        return names[annotation]
    return "list of text"


def _spelled(value: object) -> str:
    """The value as TOML has it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, tuple):
        return "[" + ", ".join(_spelled(item) for item in value) + "]"
    if isinstance(value, BaseModel):
        raise TypeError("a section inside a section has no row")
    return str(value)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


PAGES_BY_NAME = {"settings.md": settings_reference, "rules.md": rules_reference}


def main() -> None:
    for name, page in PAGES_BY_NAME.items():
        (PAGES / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
