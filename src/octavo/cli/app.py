"""The command's frame: which commands there are, and what becomes of errors."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError, Parameter

from octavo import __version__
from octavo.cli.backends import backends
from octavo.cli.bench import bench
from octavo.cli.chat import chat
from octavo.cli.run import run
from octavo.cli.serve import serve
from octavo.cli.verify import verify
from octavo.errors import OctavoError

USER_ERROR = 1
USAGE_ERROR = 2

app = App(
    name="octavo",
    help="An LLM inference engine that reads the whole history in parallel and merges it exactly.",
    version=f"octavo {__version__}",
    default_parameter=Parameter(negative_iterable=()),
    suppress_keyboard_interrupt=False,
)
for command in (run, chat, serve, backends, verify, bench):
    app.command(command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 1 for an error of the user's that a sentence on
    stderr explains, 2 for wrong usage, and 128 + n where signal n would have ended it."""
    try:
        app(arguments, exit_on_error=False, result_action="return_none")
        sys.stdout.flush()  # here, so that a closed pipe shows while it can still be caught
    except CycloptsError:
        return USAGE_ERROR  # cyclopts has printed it
    except OctavoError as error:
        print(f"octavo: {error}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # Whoever read us has left. What is still buffered must not fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    return 0
