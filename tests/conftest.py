"""Settings that have to be made before any test imports torch."""

import os

# As the engine itself does (engine/build.py): OpenMP threads that spin ruin a shared machine.
os.environ.setdefault("GOMP_SPINCOUNT", "200")
