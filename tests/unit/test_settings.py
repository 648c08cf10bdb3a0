"""Settings: precedence of the four layers, strictness, and errors of one line that name the setting."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from pydantic import ValidationError

from prefixproxy.errors import UsageError
from prefixproxy.settings import (
    Admission,
    Settings,
    amended,
    config_file,
    load_settings,
    packaged_config,
    upstream_values,
)
from prefixproxy.settings_errors import setting_names

EXAMPLES = ("default.toml", "llama-server.toml", "ollama.toml", "team.toml")


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    return write(tmp_path / "empty.toml", "")


def problem(toml: str, tmp_path: Path, **environ: str) -> str:
    with pytest.raises(UsageError) as caught:
        load_settings(write(tmp_path / "bad.toml", toml), {}, environ)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_each_layer_wins_over_the_one_below(tmp_path: Path) -> None:
    path = write(tmp_path / "a.toml", "[server]\nport = 1\nhost = 'toml'\nmax_body_bytes = 2048\n")
    environ = {"PREFIXPROXY_SERVER__PORT": "2", "PREFIXPROXY_SERVER__HOST": "env"}
    server = load_settings(path, {"server.port": 3}, environ).server
    assert (server.port, server.host, server.max_body_bytes, server.api_keys) == (3, "env", 2048, ())


def test_overrides_may_be_nested_or_dotted_and_none_is_not_given(empty: Path) -> None:
    overrides = {"server.port": 9, "server": {"host": "h"}, "engine.model": None, "admission.fork": False}
    settings = load_settings(empty, overrides, {})
    assert (settings.server.port, settings.server.host) == (9, "h")
    assert (settings.engine.model, settings.admission.fork) == ("", False)


def test_environment_values_are_converted_by_type(empty: Path) -> None:
    settings = load_settings(
        empty,
        {},
        {
            "PREFIXPROXY_ADMISSION__FORK": "false",
            "PREFIXPROXY_REUSE__CANARY_FRACTION": "0.25",
            "PREFIXPROXY_SERVER__API_KEYS": "one, two",
            "PREFIXPROXY_STABILISE__DISABLED": '["a", "b"]',
            "PREFIXPROXY_UPSTREAMS": '[{"name": "x", "url": "http://h:1"}]',
            "prefixproxy_journal__keep": "7",
        },
    )
    assert settings.admission.fork is False
    assert settings.reuse.canary_fraction == 0.25
    assert settings.server.api_keys == ("one", "two")
    assert settings.stabilise.disabled == ("a", "b")
    assert [(u.name, u.url) for u in settings.upstreams] == [("x", "http://h:1")]
    assert settings.journal.keep == 7


def test_a_list_replaces_the_list_below(tmp_path: Path) -> None:
    path = write(tmp_path / "a.toml", "[[upstreams]]\nurl = 'http://below:1'\nslots = 3\n")
    (upstream,) = load_settings(path, {"upstreams": upstream_values(["http://above:2"])}, {}).upstreams
    assert (upstream.url, upstream.slots) == ("http://above:2", 0)


def test_empty_variables_and_service_links_are_ignored(empty: Path) -> None:
    environ = {
        "PREFIXPROXY_SERVER__PORT": "",
        "PREFIXPROXY_PORT": "tcp://10.0.0.1:8100",
        "PREFIXPROXY_PORT_8100_TCP_ADDR": "10.0.0.1",
        "PREFIXPROXY_SERVICE_HOST": "10.0.0.1",
        "PREFIXPROXY_SERVICE_PORT_HTTP": "8100",
        "HOME": "/nowhere",
    }
    assert load_settings(empty, {}, environ) == Settings()


def test_the_process_environment_is_never_read_behind_the_callers_back(
    empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFIXPROXY_SERVER__PORT", "4")
    assert load_settings(empty, {}, {}).server.port == 8100


def test_unknown_key_names_the_setting_that_was_meant(tmp_path: Path) -> None:
    message = problem("[server]\nprot = 1\n", tmp_path)
    assert message.startswith("server.prot: unknown setting (did you mean server.port?)")
    assert "bad.toml" in message


def test_a_key_in_the_wrong_section_is_pointed_to_the_right_one(tmp_path: Path) -> None:
    assert "context.queue_limit: unknown setting (did you mean admission.queue_limit?)" in problem(
        "[context]\nqueue_limit = 1\n", tmp_path
    )


def test_unknown_section_in_file_and_environment(tmp_path: Path) -> None:
    assert "sevrer: unknown setting (did you mean server?)" in problem("[sevrer]\nport = 1\n", tmp_path)
    message = problem("", tmp_path, PREFIXPROXY_SEVRER__PORT="1")
    assert message == "PREFIXPROXY_SEVRER__PORT: unknown setting (did you mean server?)"


def test_unknown_key_in_the_environment_says_where_it_stands(tmp_path: Path) -> None:
    message = problem("", tmp_path, PREFIXPROXY_SERVER__PROT="1")
    assert message == "server.prot: unknown setting (did you mean server.port?) [environment]"


def test_all_problems_come_in_one_line(tmp_path: Path) -> None:
    message = problem(
        "[server]\nport = 'x'\nprot = 1\n[admission]\npolicy = 'lifo'\n[[upstreams]]\nname = 'a'\n", tmp_path
    )
    for name in ("server.port: ", "server.prot: ", "admission.policy: ", "upstreams[0].url: is required"):
        assert name in message
    assert message.count("; ") == 3


@pytest.mark.parametrize(
    ("toml", "expected"),
    [
        ("[server]\nport = '8100'", "server.port: must be a whole number, not text"),
        ("[server]\nport = true", "server.port: must be a whole number, not true or false"),
        ("[server]\nport = 70000", "server.port: must be less than or equal to 65535 (got 70000)"),
        ("[server]\nport = -1", "server.port: must be greater than or equal to 0 (got -1)"),
        ("[server]\nhost = 1", "server.host: must be text in quotes, not a whole number"),
        ("[server]\napi_keys = 'k'", "server.api_keys: must be a list, not text"),
        ("[server]\napi_keys = ['']", "server.api_keys: must not contain an empty key"),
        ("[server]\napi_keys = ['k\u00e9y']", "server.api_keys[0]: must be printable ASCII"),
        ("[server]\napi_keys = [' k']", "server.api_keys[0]: must be printable ASCII"),
        ("[[upstreams]]\nurl = 'http://h'\napi_key = '\u20ac'", "upstreams[0].api_key: must be printable ASCII"),
        ('[[upstreams]]\nurl = "http://h"\napi_key = "a\\nb"', "upstreams[0].api_key: must be printable ASCII"),
        ("[[tenants]]\nname = 'a'\napi_key = '\u00fc'", "tenants[0].api_key: must be printable ASCII"),
        ("[[tenants]]\nname = 'a'\napi_key = ''", "tenants[0].api_key: must not be empty"),
        ("[server]\nhost = ''", "server.host: must not be empty"),
        ("[state]\npath = ''", "state.path: must not be empty"),
        ("[server]\nport = 1.5", "server.port: must be a whole number (got 1.5)"),
        ("[server]\nport = 2020-01-01", "server.port: must be a whole number, not a date"),
        ("[server]\nport = 12:00:00", "server.port: must be a whole number, not a time"),
        ("[admission]\nqueue_timeout = 'x'", "admission.queue_timeout: must be a number, not text (got 'x')"),
        ("[admission]\nqueue_timeout = 1e308", "admission.queue_timeout: must be less than or equal to 86400"),
        ("[admission]\nconcurrency = 1180591620717411303424", "admission.concurrency: must be less than or equal to"),
        ('[server]\n"a\\nb" = 1', r"server.'a\nb': unknown setting"),
        ("server = 1", "server: must be a table, not a whole number"),
        ("[upstreams]\nurl = 'x'", "upstreams: must be a list, not a table"),
        ("[reuse]\ncanary_fraction = 1.5", "reuse.canary_fraction: must be less than or equal to 1 (got 1.5)"),
        ("[reuse]\nmode = 'maybe'", "reuse.mode: must be one of 'on', 'canary' or 'off' (got 'maybe')"),
        ("[admission]\nqueue_timeout = nan", "admission.queue_timeout: must be a finite number (got nan)"),
        ("[admission]\nfork = 1", "admission.fork: must be true or false, not a whole number"),
        ("[admission]\nqueue_limit = 0", "admission.queue_limit: must be greater than or equal to 1 (got 0)"),
        ("[engine]\nparallel = 0", "engine.parallel: must be greater than or equal to 1 (got 0)"),
        ("[[tenants]]\nname = 'a'\napi_key = 'k'\nweight = 0", "tenants[0].weight: must be greater than 0 (got 0)"),
        ("[[tenants]]\nname = 'a b'\napi_key = 'k'", "tenants[0].name: must be 1 to 63 letters"),
    ],
)
def test_wrong_values_are_named(toml: str, expected: str, tmp_path: Path) -> None:
    assert problem(toml, tmp_path).startswith(expected)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("ftp://h", "must look like http://host:port"),
        ("localhost:8080", "must look like http://host:port"),
        ("http://", "must look like http://host:port"),
        ("http://h:99999", "is no URL"),
        ("http://h:0", "port must be 1 to 65535"),
        ("http://u:secret@h", "must not contain a user or password"),
        ("http://h/?a=1", "must not contain a query or fragment"),
    ],
)
def test_upstream_urls_are_checked(url: str, expected: str, tmp_path: Path) -> None:
    message = problem(f"[[upstreams]]\nurl = '{url}'\n", tmp_path)
    assert message.startswith(f"upstreams[0].url: {expected}")
    assert "secret" not in message


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_upstream_urls_lose_their_v1(url: str, empty: Path) -> None:
    assert load_settings(empty, {"upstreams": upstream_values([url])}, {}).upstreams[0].url == "http://h:1"


def test_upstream_urls_keep_other_paths_and_ipv6(empty: Path) -> None:
    upstreams = load_settings(empty, {"upstreams": upstream_values(["http://h/llama", "http://[::1]:2"])}, {}).upstreams
    assert [(u.name, u.url) for u in upstreams] == [("h", "http://h/llama"), ("1:2", "http://[::1]:2")]
    (upstream,) = load_settings(empty, {"upstreams": upstream_values(["http://[::1]:8080"])}, {}).upstreams
    assert (upstream.name, upstream.url) == ("local", "http://[::1]:8080")


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8100"),
        ("127.0.0.1", "http://localhost:8100/v1"),
        ("localhost", "http://[::1]:8100"),
        ("0.0.0.0", "http://127.0.0.1:8100"),
        ("::", "http://LOCALHOST:8100"),
        ("box.example", "http://box.example:8100"),
    ],
)
def test_an_upstream_that_is_the_proxy_itself(host: str, url: str, tmp_path: Path) -> None:
    message = problem(f"[server]\nhost = '{host}'\n[[upstreams]]\nurl = '{url}'\n", tmp_path)
    assert message == f"upstreams[0].url: {url.removesuffix('/v1')} is where the proxy itself listens"


@pytest.mark.parametrize(
    ("host", "port", "url"),
    [
        ("127.0.0.1", 8100, "http://127.0.0.1:8101"),
        ("127.0.0.1", 8100, "http://127.0.0.2:8100"),
        ("0.0.0.0", 8100, "http://box.example:8100"),
        ("127.0.0.1", 0, "http://127.0.0.1:8100"),
        ("127.0.0.1", 80, "https://127.0.0.1"),
    ],
)
def test_an_upstream_beside_the_proxy(host: str, port: int, url: str, empty: Path) -> None:
    given = {"server.host": host, "server.port": port, "upstreams": upstream_values([url])}
    assert load_settings(empty, given, {}).upstreams[0].url == url


@pytest.mark.parametrize(
    ("one", "other", "told"),
    [
        ("http://h:1", "http://h:1", "http://h:1"),
        ("http://h:1/", "http://H:1/v1", "http://h:1 and http://H:1"),
        ("http://h", "http://h:80", "http://h and http://h:80"),
        ("http://127.0.0.1:1", "http://localhost:1", "http://127.0.0.1:1 and http://localhost:1"),
        ("http://localhost:1", "http://[::1]:1", "http://localhost:1 and http://[::1]:1"),
    ],
)
def test_one_server_under_two_names_would_have_its_slots_taken_twice(
    one: str, other: str, told: str, empty: Path
) -> None:
    values = [{"name": "a", "url": one}, {"name": "b", "url": other}]
    with pytest.raises(UsageError) as caught:
        load_settings(empty, {"upstreams": values}, {})
    assert str(caught.value) == f"upstreams: 'a' and 'b' are the same server ({told}): name it once"


@pytest.mark.parametrize(
    ("urls", "names"),
    [
        (["http://h:1", "http://h:2"], ["h:1", "h:2"]),
        (["https://gw/a", "https://gw/b/c"], ["gw.a", "gw.b.c"]),
        (["http://127.0.0.1:1", "http://127.0.0.2:1", "http://[::1]:1"], ["127.0.0.1:1", "127.0.0.2:1", "1:1"]),
    ],
)
def test_servers_on_one_host_have_names_of_their_own(urls: list[str], names: list[str], empty: Path) -> None:
    assert [u.name for u in load_settings(empty, {"upstreams": upstream_values(urls)}, {}).upstreams] == names


def test_names_and_keys_must_be_unique(tmp_path: Path) -> None:
    twice = "[[upstreams]]\nurl = 'http://a'\n[[upstreams]]\nurl = 'http://b'\n"
    assert problem(twice, tmp_path) == "upstreams: name 'local' occurs twice"
    tenants = "[[tenants]]\nname = 'a'\napi_key = 'k1'\n[[tenants]]\nname = 'a'\napi_key = 'k2'\n"
    assert problem(tenants, tmp_path) == "tenants: name 'a' occurs twice"
    shared = "[server]\napi_keys = ['k3']\n[[tenants]]\nname = 'a'\napi_key = 'k3'\n"
    message = problem(shared, tmp_path)
    assert message == "tenants: an api_key occurs twice, or also in server.api_keys"


def test_files_that_cannot_be_read_or_parsed(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.toml", tmp_path):
        with pytest.raises(UsageError, match="cannot read the settings file"):
            load_settings(path, {}, {})
    assert "not valid TOML" in problem("[server\n", tmp_path)
    binary = tmp_path / "b.toml"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="not valid TOML"):
        load_settings(binary, {}, {})


def test_broken_json_in_the_environment_names_the_variable(tmp_path: Path) -> None:
    assert problem("", tmp_path, PREFIXPROXY_UPSTREAMS='[{"url"') == "PREFIXPROXY_UPSTREAMS: not valid JSON"


def test_the_local_file_is_found_before_the_packaged_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert config_file(None) == packaged_config("default.toml")
    write(tmp_path / "prefixproxy.toml", "[server]\nport = 5\n")
    assert load_settings(None, {}, {}).server.port == 5
    assert config_file(Path("other.toml")) == Path("other.toml")


def test_home_is_expanded(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somebody")
    settings = load_settings(empty, {"engine.model": "~/m.gguf"}, {})
    assert settings.state.path == "/somebody/.local/state/prefixproxy/state.db"
    assert settings.engine.model == "/somebody/m.gguf"
    assert load_settings(empty, {"state.path": ":memory:"}, {}).state.path == ":memory:"


def test_rule_files_are_relative_to_the_file_that_names_them(tmp_path: Path) -> None:
    path = write(tmp_path / "a.toml", "[stabilise]\nrules = ['mine.toml', '/abs/x.toml']\n")
    assert load_settings(path, {}, {}).stabilise.rules == (str(tmp_path / "mine.toml"), "/abs/x.toml")


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_example_file_loads(name: str) -> None:
    assert load_settings(packaged_config(name), {}, {}).server.port == 8100


def test_the_example_files_are_exactly_these() -> None:
    assert sorted(path.name for path in packaged_config("default.toml").parent.glob("*")) == sorted(EXAMPLES)


def test_the_default_file_says_the_defaults_and_names_every_setting(tmp_path: Path) -> None:
    path = packaged_config("default.toml")
    assert load_settings(path, {}, {}) == Settings()
    assignment = re.compile(r"^(?:# )?(\[|\w+ = )", flags=re.MULTILINE)
    everything = assignment.sub(r"\1", path.read_text(encoding="utf-8"))
    settings = load_settings(write(tmp_path / "all.toml", everything), {}, {})
    assert (len(settings.upstreams), len(settings.tenants)) == (1, 1)
    given = tomllib.loads(everything)
    for name in setting_names(Settings):
        section, leaf = name.replace("[]", "").split(".")
        table = given[section][0] if "[]" in name else given[section]
        assert leaf in table, name


def test_settings_are_frozen_and_hide_keys(empty: Path) -> None:
    settings = load_settings(empty, {"server.api_keys": ["hush"]}, {})
    assert "hush" not in repr(settings)
    with pytest.raises(ValidationError):
        setattr(settings.server, "port", 1)  # noqa: B010


def test_amending_the_admission_section() -> None:
    assert amended(Admission(), {"queue_limit": 3}) == Admission(queue_limit=3)
    with pytest.raises(UsageError) as caught:
        amended(Admission(), {"queue_limt": 3, "fork": "yes"})
    assert str(caught.value) == (
        "admission.fork: must be true or false, not text (got 'yes'); "
        "admission.queue_limt: unknown setting (did you mean admission.queue_limit?)"
    )


def test_a_number_that_no_double_can_hold() -> None:
    with pytest.raises(UsageError, match=r"^admission.queue_timeout: must be a finite number$"):
        amended(Admission(), {"queue_timeout": 10**400})


def test_what_a_list_of_keys_was_given_is_not_shown(tmp_path: Path) -> None:
    assert "hush" not in problem("[server]\napi_keys = 'hush'", tmp_path)
