"""The ``octavo`` command: one file per command, flags with vLLM's names.

Nothing here imports torch or numba before a model is loaded, so that ``--help`` answers at once.
"""

import signal
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """:func:`octavo.cli.app.main`; importing it takes 0.1 s, and Ctrl-C may come meanwhile."""
    try:
        from octavo.cli.app import main as run
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 128 + signal.SIGINT
    return run(arguments)


__all__ = ["main"]
