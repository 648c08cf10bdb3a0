"""Real clients, two sessions of two turns each, straight to the engine and through the proxy.

`make test-clients` installs them and runs this; what is not installed is skipped.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest
from acted_engine import Script
from asked_ollama import through_ollama, to_ollama
from checking import by_number, check_nothing_lost, check_prefixes
from known_clients import AGENTS, LIBRARIES, NOTES, OLLAMA, WORDS, Agent, Client, Library, tool_calls
from report import Table
from running import Run, command_output, straight, through

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]

ADVISED_REPLAY_LIMIT = 512
"""Of tokens, for agents with long tool loops: a git status then stays behind the first question (decision 0013)."""

Way = Callable[[], AbstractContextManager[tuple[str, Run]]]


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> Iterator[Table]:
    table = Table()
    yield table
    plugins = request.config.pluginmanager
    reporter, capture = plugins.get_plugin("terminalreporter"), plugins.get_plugin("capturemanager")
    if reporter is not None and capture is not None and table.rows:
        with capture.global_and_fixture_disabled():
            reporter.write("\n" + table.text + "\n")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A project under git, for agents that look at one."""
    project = tmp_path / "project"
    project.mkdir()
    (project / NOTES).write_text("Sheet 7 lies in drawer 3.\n")
    _git(project, "init", "--quiet", "--initial-branch=main")
    commit(project, "first")
    return project


def _git(project: Path, *words: str) -> None:
    author = ["-c", "user.name=clerk", "-c", "user.email=clerk@example.org"]
    subprocess.run(["git", *author, *words], cwd=project, check=True, timeout=60)


def commit(project: Path, message: str) -> None:
    _git(project, "add", ".")
    _git(project, "commit", "--quiet", "--message", message)


def skip_unless_installed(client: Client) -> str:
    version = client.version
    if not version:
        pytest.skip(f"{client.package} is not installed: see what `make test-clients` said of it")
    return version


def libraries_run(library: Library, way: Way, home: Path) -> Run:
    with way() as (url, run):
        for session in range(1, library.sessions + 1):
            out = command_output(library.command(url, session), home, home, dict(library.quiet or {}))
            run.said += json.loads(out.splitlines()[-1])
    return run


def agents_run(agent: Agent, way: Way, folder: Path, home: Path) -> Run:
    """A commit lies between the sessions, so whoever tells the model of git tells something else."""
    home.mkdir()
    with way() as (url, run):
        environment = agent.environment(url, home)
        for number, words in enumerate(WORDS):
            for turn, said in enumerate(words):
                run.said.append(command_output(agent.command(said, turn > 0), folder, home, environment).strip())
            (folder / f"more-{number}-{home.name}.txt").write_text("more\n")
            commit(folder, f"after session {number} of {home.name}")
    return run


def check(client: Client, plain: Run, run: Run) -> None:
    assert run.said == plain.said
    assert all(answer in {each.words.text for each in run.asked} for answer in run.said)
    check_prefixes(run, client.appended, client.mended)
    for number, forwarded in by_number(run).items():
        check_nothing_lost(run.sent[number], forwarded)


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda client: client.driver)
def test_library(library: Library, table: Table, tiny_model: Path, tmp_path: Path) -> None:
    version, script = skip_unless_installed(library), Script(tool_calls(tmp_path))
    plain, run = (libraries_run(library, partial(way, tiny_model, script), tmp_path) for way in (straight, through))
    table.add(library.name, version, plain, run)
    check(library, plain, run)


def test_ollama_python(table: Table, tmp_path: Path) -> None:
    version = skip_unless_installed(OLLAMA)
    plain, run = (libraries_run(OLLAMA, way, tmp_path) for way in (to_ollama, through_ollama))
    table.add(OLLAMA.name, version, plain, run)
    check(OLLAMA, plain, run)


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.name.lower().replace(" ", "_"))
def test_coding_agent(agent: Agent, table: Table, tiny_model: Path, folder: Path, tmp_path: Path) -> None:
    version, script = skip_unless_installed(agent), Script(tool_calls(folder))
    ways = {"straight": partial(straight, tiny_model, script)}
    ways["through"] = partial(through, tiny_model, script, replay_limit=ADVISED_REPLAY_LIMIT)
    plain, run = (agents_run(agent, way, folder, tmp_path / name) for name, way in ways.items())
    table.add(agent.name, version, plain, run)
    check(agent, plain, run)
