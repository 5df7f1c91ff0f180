"""Showing an answer while it grows."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator

from octavo.outputs import RequestOutput


def print_as_it_comes(
    outputs: Generator[RequestOutput], stopped: Callable[[], bool] = lambda: False
) -> RequestOutput:
    """Write the first answer to stdout piece by piece, end its line, return the last output.

    ``stopped`` is asked after each piece; once it says yes the request is aborted, which gives out
    the rest that was withheld.
    """
    written = 0

    def write(output: RequestOutput) -> None:
        nonlocal written
        text = output.outputs[0].text
        sys.stdout.write(text[written:])
        sys.stdout.flush()
        written = len(text)

    for output in outputs:
        write(output)
        if stopped():
            outputs.close()
            write(output)
            break
    sys.stdout.write("\n")
    sys.stdout.flush()
    return output
