"""Loading a model with something to look at meanwhile."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING

from octavo.config import EngineConfig

if TYPE_CHECKING:
    from octavo.llm import LLM


def load(model: str | None, engine: EngineConfig) -> LLM:
    """The loaded model; what its checkpoint changes or what precision it costs goes to stderr."""
    options = {field.name: getattr(engine, field.name) for field in fields(engine)}
    options["model"] = model
    with _waiting(f"loading {model or 'the embedded model'}"):
        _import_numpy()
        from octavo.llm import LLM  # 1.5 s where it takes torch

        llm = LLM(**options)
    for note in llm.report.notes:
        print(f"octavo: {note}", file=sys.stderr)
    return llm


def _import_numpy() -> None:
    """Without a thread of its BLAS for every core: nothing here multiplies with it, and beside a
    busy program they take as long to start as the import."""
    name = "OPENBLAS_NUM_THREADS"
    if name in os.environ:
        return
    os.environ[name] = "1"
    import numpy  # noqa: F401

    del os.environ[name]  # torch's may be another's to read


@contextmanager
def _waiting(message: str) -> Iterator[None]:
    """A spinner on stderr where it is a terminal, else a line."""
    if not sys.stderr.isatty():
        print(f"octavo: {message} ...", file=sys.stderr)
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(message, spinner="dots"):
        yield
