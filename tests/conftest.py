"""Settings that have to be made before any test imports torch or Triton, and one seed for all."""

import os
import sys
from pathlib import Path

import pytest

# As the engine itself does (engine/build.py): OpenMP threads that spin ruin a shared machine.
os.environ.setdefault("GOMP_SPINCOUNT", "200")

# Triton decides when a kernel is imported, and tests/gpu is collected before tests/kernels.
if not Path("/proc/driver/nvidia/version").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Random tensors are the same in every run, whatever runs before a test."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
