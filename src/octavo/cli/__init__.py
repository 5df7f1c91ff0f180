"""The ``octavo`` command: one file per command, flags with vLLM's names.

Nothing here imports torch or numba before a model is loaded, so that ``--help`` answers at once.
"""

from octavo.cli.app import main

__all__ = ["main"]
