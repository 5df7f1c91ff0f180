"""The command's frame: which commands there are, and what becomes of errors."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module

from cyclopts import App, CycloptsError, Parameter

from octavo import __version__
from octavo.errors import OctavoError

USER_ERROR = 1
USAGE_ERROR = 2

COMMANDS = ("run", "chat", "serve", "backends", "verify", "bench")


def make_app(commands: Sequence[str] = COMMANDS) -> App:
    """The command with some of its subcommands, each in the module of its name."""
    app = App(
        name="octavo",
        help="An LLM inference engine that reads the whole history in parallel and merges it "
        "exactly.",
        version=f"octavo {__version__}",
        default_parameter=Parameter(negative_iterable=(), show_default=_as_typed),
        suppress_keyboard_interrupt=False,
    )
    for command in commands:
        app.command(getattr(import_module(f"octavo.cli.{command}"), command))
    return app


def _as_typed(default: object) -> str | None:
    """A default as the user would type it; None shows none."""
    if isinstance(default, tuple):
        return " ".join(map(str, default)) or None
    return None if default is None else str(default)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 1 for an error of the user's that a sentence on
    stderr explains, 2 for wrong usage, and 128 + n where signal n would have ended it."""
    given = sys.argv[1:] if arguments is None else arguments
    _mend_streams()
    # All six are for --help, and for what is wrong: importing them takes 30 ms.
    known = [given[0]] if given and given[0] in COMMANDS else COMMANDS
    try:
        make_app(known)(given, exit_on_error=False, result_action="return_none")
        sys.stdout.flush()  # here, so that a closed pipe shows while it can still be caught
    except CycloptsError:
        return USAGE_ERROR  # cyclopts has printed it
    except OctavoError as error:
        print(f"octavo: {error}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:  # whoever read us has left
        _drop_output()
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _drop_output()
        print(f"octavo: the output can't be written: {error.strerror}", file=sys.stderr)
        return USER_ERROR
    return 0


def _mend_streams() -> None:
    """A stdin that the caller closed is an empty one, a stdout nobody's; a character that stdout's
    encoding lacks becomes "?", instead of an error in the middle of an answer."""
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115 - to the end
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _drop_output() -> None:
    """What is still buffered must not fail again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
