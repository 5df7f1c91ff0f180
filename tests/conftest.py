"""Settings that have to be made before any test imports torch or Triton."""

import os
from pathlib import Path

# As the engine itself does (engine/build.py): OpenMP threads that spin ruin a shared machine.
os.environ.setdefault("GOMP_SPINCOUNT", "200")

# Triton decides when a kernel is imported, and tests/gpu is collected before tests/kernels.
if not Path("/proc/driver/nvidia/version").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
