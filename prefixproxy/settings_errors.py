"""Wrong settings in words: which setting, what is wrong with it, where it was written, what was probably meant."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date, time
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

Loc = tuple[str | int, ...]

_WANTED = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text in quotes",
    "tuple": "a list",
    "list": "a list",
    "model": "a table",
    "dict": "a table",
}
_GOT = {
    str: "text",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    list: "a list",
    dict: "a table",
    date: "a date",
    time: "a time",
    type(None): "null",
}
_SHOWN_CHARACTERS = 80


@dataclass(frozen=True, slots=True)
class Layer:
    """One source of settings: its name for messages and the nested values it gave."""

    name: str
    values: dict[str, Any]


def describe(error: ValidationError, model: type[BaseModel], layers: Sequence[Layer], under: str = "") -> str:
    """All problems of one validation in one line. `layers` from the strongest to the weakest; `under` is the section
    that `model` itself stands for."""
    return "; ".join(_line(detail, model, layers, under) for detail in error.errors(include_url=False))


def unknown(loc: Loc, model: type[BaseModel], shown: str, under: str = "") -> str:
    """The message for a key that is no setting, with the nearest one that is."""
    guess = _nearest(loc, model)
    guess = f"{under}.{guess}" if guess and under else guess
    return f"{shown}: unknown setting" + (f" (did you mean {guess}?)" if guess else "")


def setting_names(model: type[BaseModel]) -> Iterator[str]:
    """Every dotted name in the tree: `server.port`, `upstreams[].url`."""
    for name, field in model.model_fields.items():
        inner = inner_model(field.annotation)
        if inner is None:
            yield name
        else:
            listed = "[]" if field.annotation is not inner else ""
            yield from (f"{name}{listed}.{leaf}" for leaf in setting_names(inner))


def inner_model(annotation: Any) -> type[BaseModel] | None:
    """The section class behind a field: its type, or the item type of a list of tables."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for arg in get_args(annotation) if (found := inner_model(arg))), None)


def _line(detail: ErrorDetails, model: type[BaseModel], layers: Sequence[Layer], under: str) -> str:
    loc, kind = detail["loc"], detail["type"]
    shown = ".".join(part for part in (under, _dotted(loc)) if part)
    if kind == "extra_forbidden":
        text = unknown(loc, model, shown, under)
    elif shown:
        text = f"{shown}: {_what(detail)}"
    else:
        text = _what(detail)
    origin = next((layer.name for layer in layers if _holds(layer.values, loc)), "")
    return f"{text} [{origin}]" if origin and loc else text


def _what(detail: ErrorDetails) -> str:
    kind, value, ctx = detail["type"], detail["input"], detail.get("ctx", {})
    if kind == "missing":
        return "is required"
    if kind == "value_error":
        return str(ctx["error"])
    if kind == "literal_error":
        return f"must be one of {ctx['expected']}" + (
            f" (got {value[:_SHOWN_CHARACTERS]!r})" if isinstance(value, str) else ""
        )
    base, _, suffix = kind.partition("_")
    if kind == "string_too_short":
        return "must not be empty"
    if kind == "string_unicode":
        return "must be valid Unicode text"
    if kind == "float_type" and isinstance(value, int) and not isinstance(value, bool):
        return "must be a finite number"
    if base in _WANTED and suffix in ("type", "parsing", "parsing_size", "from_float", "attributes_type"):
        return f"must be {_WANTED[base]}{_instead(base, value)}"
    message = detail["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    shown = f" (got {value})" if isinstance(value, int | float) else ""
    return f"must be {message}{shown}"


def _instead(base: str, value: Any) -> str:
    """What stands there. Text in place of a number or a switch is shown, other text may be a key."""
    got = next((text for type_, text in _GOT.items() if isinstance(value, type_)), "something else")
    if base == "int" and isinstance(value, float):
        return f" (got {value})"
    shown = base in ("int", "float", "bool") and isinstance(value, str)
    return f", not {got}" + (f" (got {value[:_SHOWN_CHARACTERS]!r})" if shown else "")


def _dotted(loc: Loc) -> str:
    out = ""
    for part in loc:
        if isinstance(part, int):
            out += f"[{part}]"
        else:
            name = part if part.isprintable() else repr(part)
            out += ("." if out else "") + name[:_SHOWN_CHARACTERS]
    return out


def _holds(values: Any, loc: Loc) -> bool:
    for part in loc:
        if isinstance(values, dict) and part in values:
            values = values[part]
        elif isinstance(values, list | tuple) and isinstance(part, int) and part < len(values):
            values = values[part]
        else:
            return False
    return True


def _nearest(loc: Loc, model: type[BaseModel]) -> str:
    """The neighbour of nearly the same spelling, else the setting of exactly this name in another section."""
    *outer, last = loc
    section: type[BaseModel] | None = model
    for part in outer:
        if isinstance(part, str) and section is not None:
            field = section.model_fields.get(part)
            section = inner_model(field.annotation) if field else None
    if section is not None:
        near = get_close_matches(str(last), section.model_fields, n=1, cutoff=0.6)
        if near:
            return _dotted((*outer, near[0]))
    return next((name for name in setting_names(model) if name.rsplit(".", 1)[-1] == last), "")
