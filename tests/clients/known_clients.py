"""The clients that are driven: how each is installed, started and told where the proxy is."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DRIVERS = Path(__file__).parent / "drive"
INSTALLED = Path(os.environ.get("CLIENTS") or ROOT / ".venv-clients").absolute()
PYTHON = INSTALLED / "bin" / "python"
NPM = Path(os.environ.get("CLIENTS_NPM") or INSTALLED / "npm").absolute() / "node_modules"

WORDS = (
    ("Where is sheet 7?", "And which scale has it?"),
    ("Tell me where sheet 8 is.", "And its scale?"),
    ("Please find sheet 9.",),
)
"""What a user says to a coding agent: two sessions of two turns, and the first turn of a third. What is moved once it
was seen to change is seen to in the second session, so the third is the first that finds the moved prompt."""
NOTES = "notes.txt"


@dataclass(frozen=True)
class Library:
    """A package from PyPI with a driver script of ours. `appended`: requests of all sessions whose prompt is that of
    an earlier one and more, in the client's own bytes; `mended`: the same as they went upstream."""

    name: str
    package: str
    driver: str
    appended: int
    mended: int
    quiet: Mapping[str, str] | None = None
    sessions: int = 2

    @property
    def version(self) -> str:
        return _python_packages().get(self.package, "")

    def command(self, url: str, session: int) -> list[str]:
        return [str(PYTHON), str(DRIVERS / f"{self.driver}.py"), url, str(session)]


@dataclass(frozen=True)
class Agent:
    """A coding agent from npm. `command` of a turn's words and whether it continues a session; `environment` of the
    URL and its home, where it may write settings."""

    name: str
    package: str
    command: Callable[[str, bool], list[str]]
    environment: Callable[[str, Path], dict[str, str]]
    appended: int
    mended: int

    @property
    def version(self) -> str:
        file = NPM / self.package / "package.json"
        return str(json.loads(file.read_text())["version"]) if file.is_file() else ""


Client = Library | Agent


@cache
def _python_packages() -> dict[str, str]:
    """Names in lower case and versions of what the clients' own environment has."""
    if not PYTHON.is_file():
        return {}
    code = (
        "import importlib.metadata as m, json; "
        "print(json.dumps({d.metadata['Name'].lower(): d.version for d in m.distributions()}))"
    )
    listed = subprocess.run([PYTHON, "-c", code], check=True, capture_output=True, text=True, timeout=120)
    return dict(json.loads(listed.stdout))


def tool_calls(folder: Path) -> dict[str, Any]:
    """Arguments for the reading tool of each agent, and for the drivers' own."""
    notes = str(folder / NOTES)
    return {
        "lookup": {"sheet": 7},
        "Read": {"file_path": notes},
        "read_file": {"file_path": notes},
        "read": {"filePath": notes, "path": notes},
        "exec_command": {"cmd": f"cat {NOTES}"},
    }


def _program(name: str) -> str:
    return str(NPM / ".bin" / name)


def _claude(words: str, more: bool) -> list[str]:
    return [_program("claude"), "-p", *["--continue"] * more, words, "--allowedTools", "Read"]


def _claude_environment(url: str, _home: Path) -> dict[str, str]:
    return {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": "unused",
        "ANTHROPIC_MODEL": "local",
        "DISABLE_TELEMETRY": "1",
        "DISABLE_ERROR_REPORTING": "1",
        "DISABLE_AUTOUPDATER": "1",
    }


def _codex(words: str, more: bool) -> list[str]:
    return [_program("codex"), "exec", *["resume", "--last"] * more, words]


CODEX_CONFIG = """model = "local"
model_provider = "prefixproxy"

[model_providers.prefixproxy]
name = "prefixproxy"
base_url = "{url}/v1"
wire_api = "responses"
"""


def _codex_environment(url: str, home: Path) -> dict[str, str]:
    (home / ".codex").mkdir(exist_ok=True)
    (home / ".codex" / "config.toml").write_text(CODEX_CONFIG.format(url=url))
    return {}


def _opencode(words: str, more: bool) -> list[str]:
    return [_program("opencode"), "run", *["--continue"] * more, words]


def _opencode_environment(url: str, home: Path) -> dict[str, str]:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "prefixproxy",
        "options": {"baseURL": f"{url}/v1", "apiKey": "unused"},
        "models": {"local": {"name": "local"}},
    }
    model = {"model": "prefixproxy/local", "provider": {"prefixproxy": provider}}
    config = home / "opencode.json"
    config.write_text(json.dumps({"autoupdate": False, "share": "disabled", **model}))
    return {"OPENCODE_CONFIG": str(config), "OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"}


def _qwen(words: str, more: bool) -> list[str]:
    return [_program("qwen"), *["--continue"] * more, "--auth-type", "openai", "--yolo", "-p", words]


def _qwen_environment(url: str, _home: Path) -> dict[str, str]:
    """It sends plain HTTP to its HTTPS_PROXY, whatever NO_PROXY says."""
    base = {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "unused", "OPENAI_MODEL": "local"}
    return {**base, "QWEN_TELEMETRY_ENABLED": "false", "HTTPS_PROXY": ""}


def _pi(words: str, more: bool) -> list[str]:
    return [
        _program("pi"),
        "--offline",
        *["--continue"] * more,
        "--provider",
        "prefixproxy",
        "--model",
        "local",
        "-p",
        words,
    ]


def _pi_environment(url: str, home: Path) -> dict[str, str]:
    provider = {"baseUrl": f"{url}/v1", "api": "openai-completions", "apiKey": "unused", "models": [{"id": "local"}]}
    folder = home / ".pi" / "agent"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "models.json").write_text(json.dumps({"providers": {"prefixproxy": provider}}))
    return {}


LIBRARIES = (
    Library("openai SDK", "openai", "openai_sdk", 6, 6),
    Library("LangGraph", "langgraph", "langgraph_map", 8, 8),
    Library("PydanticAI", "pydantic-ai-slim", "pydantic_ai_agent", 4, 6),
    Library("OpenAI Agents SDK", "openai-agents", "openai_agents", 4, 6),
    Library("LiteLLM SDK", "litellm", "litellm_sdk", 6, 6, {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}),
    Library("AutoGen", "autogen-agentchat", "autogen_agent", 4, 4),
    Library("CrewAI", "crewai", "crewai_crew", 6, 6, {"CREWAI_DISABLE_TELEMETRY": "true"}, sessions=3),
)
OLLAMA = Library("ollama-python", "ollama", "ollama_python", 2, 2)
AGENTS = (
    Agent("Claude Code", "@anthropic-ai/claude-code", _claude, _claude_environment, 7, 7),
    Agent("Codex", "@openai/codex", _codex, _codex_environment, 7, 7),
    Agent("OpenCode", "opencode-ai", _opencode, _opencode_environment, 7, 7),
    Agent("Qwen Code", "@qwen-code/qwen-code", _qwen, _qwen_environment, 7, 7),
    Agent("pi", "@mariozechner/pi-coding-agent", _pi, _pi_environment, 7, 7),
)
