"""Write requirements.lock: the versions a fresh environment gets today, as constraints for the project's own runs.

Names and versions only. Users of the package are not bound by it; `make` targets and CI are, so that a release of
somebody else's cannot turn them red overnight.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOOLS = {"pip", "setuptools", "wheel"}
HEADER = "# Versions the project's own runs use. Written by `make lock`; see scripts/lock.py.\n"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = str(Path(folder) / "bin" / "python")
        run(python, "-m", "pip", "install", "--quiet", "--upgrade", "pip>=25.1")
        run(python, "-m", "pip", "install", "--quiet", "-e", ".[local]", "--group", "dev")
        frozen = run(python, "-m", "pip", "list", "--exclude-editable", "--format=freeze")
    lines = [line for line in frozen.splitlines() if "==" in line and line.partition("==")[0].lower() not in TOOLS]
    lock = ROOT / "requirements.lock"
    lock.write_text(HEADER + "".join(f"{line}\n" for line in sorted(lines, key=str.lower)), encoding="utf-8")
    sys.stdout.write(f"{lock.name}: {len(lines)} packages\n")


def run(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    main()
