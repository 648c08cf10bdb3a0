"""`prefixproxy lint` as a user starts it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
CASES = ROOT / "tests" / "golden" / "cases"

pytestmark = pytest.mark.e2e


def lint(*arguments: str | Path, cwd: Path, stdin: bytes = b"", **environ: str) -> tuple[int, str, str]:
    """Exit code, standard output and error."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("PREFIXPROXY_", "COLUMNS"))}
    done = subprocess.run(
        [sys.executable, "-m", "prefixproxy", "lint", *map(str, arguments)],
        cwd=cwd,
        input=stdin,
        capture_output=True,
        env={**ours, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8", **environ},
        timeout=100,
        check=False,
    )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def two_clocks(folder: Path) -> list[Path]:
    """Two bodies that differ in a clock, as the documentation shows them."""
    case = json.loads((CASES / "05_ha_clock_first_words.json").read_bytes())
    paths = [folder / "first.json", folder / "second.json"]
    for path, request in zip(paths, case["requests"], strict=True):
        path.write_text(json.dumps(request["body"]), encoding="utf-8")
    return paths


def test_two_bodies_that_differ_in_a_clock_name_the_line_the_tokens_lost_and_the_rule(tmp_path: Path) -> None:
    two_clocks(tmp_path)
    code, out, err = lint("--strict", "first.json", "second.json", cwd=tmp_path)
    assert (code, err) == (0, "")
    assert "the prefix breaks at system[0], line 1" in out
    assert "Current time is 20:37:19." in out
    assert "home-assistant-clock moves system[0] line 1, at first sight" in out
    assert re.search(r"(\d+)\s+stand in both prompts and are lost", out)
    assert "Nothing breaks the cache after stabilising" in out


def test_the_documentation_shows_what_it_prints(tmp_path: Path) -> None:
    two_clocks(tmp_path)
    page = (ROOT / "docs" / "howto" / "lint.md").read_text(encoding="utf-8")
    shown = re.search(r"\$ prefixproxy lint first.json second.json\n(.*?)```", page, flags=re.DOTALL)
    assert shown
    assert lint("first.json", "second.json", cwd=tmp_path) == (0, shown[1], "")


def unknown_counter() -> bytes:
    """Two bodies that differ in a line no rule knows."""
    text = (
        "You keep the shelves of an archive.\nSheets on loan: {}\nAnswer in one sentence, and name the rule you used."
    )
    systems = [{"role": "system", "content": text.format(n)} for n in (17, 19)]
    return b"\n".join(json.dumps({"model": "m", "messages": [s, {"role": "user"}]}).encode() for s in systems)


def test_strict_fails_where_something_would_still_break_and_the_suggested_rule_mends_it(tmp_path: Path) -> None:
    stdin = unknown_counter()
    code, out, _ = lint("-", "--strict", "--json", cwd=tmp_path, stdin=stdin)
    report: dict[str, Any] = json.loads(out)
    assert (code, report["ok"]) == (1, False)
    assert report["pairs"][0]["sent"]["first_difference"]["line"] == 2
    (tmp_path / "mine.toml").write_text(report["suggestions"][0]["toml"], encoding="utf-8")
    code, out, _ = lint("-", "--strict", "--json", "--rules", "mine.toml", cwd=tmp_path, stdin=stdin)
    report = json.loads(out)
    assert (code, report["ok"], report["suggestions"]) == (0, True, [])


def test_without_strict_a_break_is_no_failure(tmp_path: Path) -> None:
    code, out, _ = lint("-", cwd=tmp_path, stdin=unknown_counter())
    assert code == 0
    assert "1 of 2 requests still break the cache" in out


def test_learned_on_the_command_line_is_that_of_the_settings(tmp_path: Path) -> None:
    code, out, _ = lint("-", "--strict", "--json", "--learned", "apply", cwd=tmp_path, stdin=unknown_counter())
    report = json.loads(out)
    assert (code, report["ok"], report["settings"]["learned"]) == (0, True, "apply")


def test_settings_are_those_of_the_proxy(tmp_path: Path) -> None:
    paths = two_clocks(tmp_path)
    (tmp_path / "prefixproxy.toml").write_text('[stabilise]\ndisabled = ["home-assistant-clock"]\nmode = "observe"\n')
    code, out, _ = lint(*paths, "--json", "--strict", cwd=tmp_path)
    report = json.loads(out)
    assert (code, report["settings"]["mode"]) == (1, "observe")
    assert "home-assistant-clock" not in out
    code, out, _ = lint(*paths, "--json", "--config", ROOT / "config" / "default.toml", cwd=tmp_path)
    assert (code, json.loads(out)["settings"]["mode"]) == (0, "apply")


@pytest.mark.parametrize(
    ("arguments", "stdin", "said"),
    [
        (["nowhere.json"], b"", "nowhere.json: cannot read it"),
        (["."], b"", "cannot read it"),
        (["-"], b'{"messages":[]}\n{"messages":', "stdin line 2: is not valid JSON"),
        (["-"], b'{"model":"m"}', "stdin: is no request body that lint knows"),
        (["-", "--path", "/v1/nope"], b'{"messages":[]}', "--path: '/v1/nope' is none of"),
        (["-", "--learned", "perhaps"], b'{"messages":[]}', "stabilise.learned"),
        (["-", "--rules", "nowhere.toml"], b'{"messages":[]}', "nowhere.toml: cannot read the rule file"),
        ([], b"", "Missing argument"),
    ],
)
def test_wrong_usage_exits_with_2_and_no_traceback(
    tmp_path: Path, arguments: list[str], stdin: bytes, said: str
) -> None:
    code, out, err = lint(*arguments, cwd=tmp_path, stdin=stdin)
    assert (code, out) == (2, "")
    assert said in err
    assert "Traceback" not in err


def test_hostile_bodies_do_not_crash_it_on_a_narrow_ascii_terminal(tmp_path: Path) -> None:
    def line(text: str) -> bytes:
        return json.dumps(
            {"messages": [{"role": "system", "content": text}, {"role": "user", "content": None}]}
        ).encode()

    filler = "漢字 and \udfff words. " * 20
    stdin = b"\n".join([line(f"\ud800 10:00:0{n} \x1b[31m\n{filler}") for n in range(3)] + [line("x" * 200_000)] * 2)
    code, out, err = lint("-", cwd=tmp_path, stdin=stdin, PYTHONIOENCODING="ascii", COLUMNS="30")
    assert (code, err) == (0, "")
    assert out.isascii()
    assert "\x1b" not in out
