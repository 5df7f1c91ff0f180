"""How long a fresh process takes to its first token, phase by phase.

The process is new each time; the files it reads are in the system's page cache after the first. Run
as a module this is that process: it times itself and prints one line of JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from octavo.errors import OctavoError

if TYPE_CHECKING:
    from octavo.config import EngineConfig


class StartupError(OctavoError):
    """The process under test didn't come to its first token."""


def measure_startup(config: EngineConfig) -> dict[str, float]:
    """Start a process and return its seconds by phase, in order; they add up to the whole time."""
    # Of one system, all processes share the monotonic clock.
    began = time.monotonic()
    child = subprocess.run(
        [sys.executable, "-m", "octavo.bench.startup", json.dumps(asdict(config))],
        capture_output=True,
        text=True,
    )
    if child.returncode != 0:
        *_, reason = child.stderr.strip().splitlines() or [f"exit code {child.returncode}"]
        raise StartupError(reason)
    laps: dict[str, float] = json.loads(child.stdout.splitlines()[-1])
    phases = {}
    for phase, end in laps.items():
        phases[phase] = end - began
        began = end
    return phases


def _start(options: dict[str, Any]) -> dict[str, float]:
    """When each phase ended, on the monotonic clock."""
    laps = {"interpreter": time.monotonic()}
    from octavo.llm import LLM
    from octavo.sampling_params import SamplingParams

    laps["import"] = time.monotonic()
    options["disable_attention_backend"] = tuple(options["disable_attention_backend"])
    llm = LLM(**options)
    loaded = time.monotonic()
    ended = loaded - sum(llm.report.phases.values())
    for phase, seconds in llm.report.phases.items():
        ended += seconds
        laps[phase] = ended
    prompt: Any = {"prompt_token_ids": [1]} if options["skip_tokenizer_init"] else "Once"
    next(llm.stream(prompt, SamplingParams(temperature=0.0, ignore_eos=True)))
    laps["first token"] = time.monotonic()
    return laps


if __name__ == "__main__":
    try:
        print(json.dumps(_start(json.loads(sys.argv[1]))))
    except OctavoError as error:
        sys.exit(str(error))
