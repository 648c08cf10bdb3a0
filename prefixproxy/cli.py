"""The `prefixproxy` command. Exit codes: 0 fine, 1 a check failed, 2 wrong usage or settings."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from prefixproxy import __version__
from prefixproxy.commands.bench import bench
from prefixproxy.commands.demo import demo
from prefixproxy.commands.doctor import doctor
from prefixproxy.commands.lint import lint
from prefixproxy.commands.plan import plan
from prefixproxy.commands.serve import serve
from prefixproxy.commands.simulate import simulate
from prefixproxy.commands.verify import verify
from prefixproxy.ending import INTERRUPTED_CODE
from prefixproxy.errors import UsageError

app = typer.Typer(
    name="prefixproxy",
    help="An OpenAI-compatible proxy that makes the KV cache of llama-server and Ollama hit.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

USAGE_ERROR = 2
_CLICK_ERROR: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")
"""What every wrong argument raises. Newer typer has click inside, and of its errors only BadParameter a public name."""


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"prefixproxy {__version__}")
        raise typer.Exit


@app.callback()
def prefixproxy(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and leave.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """What every command shares."""


for _command in (serve, demo, lint, simulate, doctor, verify, plan, bench):
    app.command()(_command)


def main() -> None:
    """Entry point: wrong usage is one line on stderr, never a traceback."""
    try:
        code = app(standalone_mode=False)
    except UsageError as failure:
        _tell(str(failure))
        code = USAGE_ERROR
    except _CLICK_ERROR as failure:
        if type(failure).__name__ == "NoArgsIsHelpError":
            failure.show()
        else:
            _tell(" ".join(failure.format_message().split()))
        code = USAGE_ERROR
    except typer.Abort:
        code = INTERRUPTED_CODE
    sys.exit(code or 0)


def _tell(wrong: str) -> None:
    typer.echo(f"prefixproxy: {wrong}", err=True)


if __name__ == "__main__":
    main()
