"""The deployment files name settings, flags and files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from prefixproxy.settings import load_settings, packaged_config

ROOT = Path(__file__).parent.parent
FILES = [path for path in sorted((ROOT / "deploy").rglob("*")) if path.is_file()]
ASSIGNMENT = re.compile(r"^\s*(?:Environment=)?(?:ENV )?(PREFIXPROXY_\w+)(?:=|: )(.+?)\s*\\?$", flags=re.MULTILINE)


def environment(path: Path) -> dict[str, str]:
    found = ASSIGNMENT.findall(path.read_text(encoding="utf-8"))
    return {name: "" if value.startswith("${") else value.strip("'") for name, value in found}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_environment_a_file_sets_is_valid(path: Path) -> None:
    load_settings(packaged_config("default.toml"), {}, environment(path))


def test_the_environments_say_what_they_are_meant_to() -> None:
    by_name = {path.name: load_settings(packaged_config("default.toml"), {}, environment(path)) for path in FILES}
    assert by_name["Dockerfile"].server.host == "0.0.0.0"
    assert by_name["Dockerfile"].state.path == by_name["prefixproxy.service"].state.path
    assert [upstream.url for upstream in by_name["compose.yaml"].upstreams] == ["http://llama-server:8080"]


def test_what_the_image_copies_is_there_or_is_the_readme() -> None:
    text = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
    copied = [
        name for line in re.findall(r"^COPY (?!--from)(.+)$", text, flags=re.MULTILINE) for name in line.split()[:-1]
    ]
    assert copied
    assert [name for name in copied if not (ROOT / name).exists() and name != "README.md"] == []


def test_the_container_runs_as_a_user_and_is_checked() -> None:
    text = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
    last_stage = text.rpartition("\nFROM ")[2]
    assert "\nUSER prefixproxy\n" in last_stage
    assert "HEALTHCHECK" in last_stage


def test_the_port_is_published_on_loopback_only() -> None:
    text = (ROOT / "deploy" / "compose.yaml").read_text(encoding="utf-8")
    ports = re.findall(r'^ +- "([\d.:]+:\d+)"$', text, flags=re.MULTILINE)
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)
