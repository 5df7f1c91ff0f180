"""Octavo's cpu runtime beside llama.cpp: the same GGUF, as many threads, alternating in one run.

    make bench-cpu                # or: python bench/cpu_engine.py --llama-python /path/to/python
    python bench/cpu_engine.py --quick

Each engine is a process of its own that measures on demand, one at a time; llama.cpp is a build of
llama-cpp-python made for this CPU, under the Python that ``--llama-python`` names, and is measured
with flash attention on and off, of which the better counts. Decode figures are tokens a second
behind a prompt that is cached; prefill figures are prompt tokens a second to the first token.
Each is the median of several turns. "of read" says what share of the memory bandwidth, measured
between the turns over as many bytes, the bytes of Octavo's step come to. Prints a table, then one
line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from octavo.checkpoint import open_checkpoint, resolve_model, weights_nbytes
from octavo.host import granted_cores

HERE = Path(__file__).parent
CONTEXTS = (32, 1024, 4096, 8064)  # SmolLM2 ends at 8,192
PREFILLS = (512, 2048)
LONGEST = 8192
CONCURRENT, CONCURRENT_PROMPT, CONCURRENT_STEPS = 8, 32, 64


class Engine:
    """A process that measures: one line of JSON in, one out."""

    def __init__(self, command: list[str], settings: dict[str, Any]) -> None:
        self._process = subprocess.Popen(
            [*command, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.hello = self._read()

    def __call__(self, task: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None
        print(json.dumps({"task": task, **arguments}), file=self._process.stdin, flush=True)
        return self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"an engine ended: {self._process.args}")
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def octavo(path: str, threads: int, **options: Any) -> Engine:
    settings = {"model": path, "threads": threads, "max_model_len": LONGEST, **options}
    return Engine([sys.executable, __file__, "--engine"], settings)


def llama(python: str, path: str, threads: int, flash: bool) -> Engine:
    settings = {
        "path": path,
        "threads": threads,
        "context": LONGEST,
        "flash": flash,
        "slots": CONCURRENT,
    }
    return Engine([python, str(HERE / "cpu_llama.py")], settings)


# ---- Octavo's side, in a process of its own


def serve(settings: dict[str, Any]) -> None:
    from octavo.llm import LLM
    from octavo.sampling_params import SamplingParams

    answers = os.fdopen(os.dup(1), "w", buffering=1)
    llm = LLM(max_num_seqs=CONCURRENT, **settings)
    print(
        json.dumps({"precision": llm.report.precision, "runtime": llm.report.runtime}), file=answers
    )

    def run(prompts: list[list[int]], steps: int) -> list[Any]:
        params = SamplingParams(temperature=0.0, max_tokens=steps, ignore_eos=True)
        given = [{"prompt_token_ids": ids} for ids in prompts]
        return llm.generate(given, params, use_tqdm=False)

    def prefill(ids: list[int]) -> float:
        begin = time.perf_counter()
        run([ids], 1)
        return time.perf_counter() - begin

    def decode(ids: list[int], steps: int) -> float:
        [output] = run([ids], steps + 1)
        metrics = output.metrics
        return (metrics.finished_time - metrics.first_token_time) / steps

    def concurrent(prompts: list[list[int]], steps: int) -> float:
        begin = time.perf_counter()
        run(prompts, steps)
        return len(prompts) * steps / (time.perf_counter() - begin)

    def bandwidth(nbytes: int) -> float:
        return read_bandwidth(nbytes)

    tasks: dict[str, Callable[..., Any]] = {
        "prefill": prefill,
        "decode": decode,
        "concurrent": concurrent,
        "bandwidth": bandwidth,
        "resident": resident,
    }
    for line in sys.stdin:
        task = json.loads(line)
        print(json.dumps(tasks[task.pop("task")](**task)), file=answers)


def read_bandwidth(nbytes: int) -> float:
    """Bytes a second that the team reads of so many, over and over: the best of five."""
    import numpy as np

    from octavo.kernels.program import Program
    from octavo.kernels.read.cpu import add_up
    from octavo.kernels.team import team

    numbers = np.ones(nbytes // 8, np.int64)
    call = add_up.bind(numbers=numbers, count=len(numbers), total=np.zeros(1, np.int64))
    program, times = Program([call]), []
    for _ in range(6):
        begin = time.perf_counter()
        team().run(program)
        times.append(time.perf_counter() - begin)
    return nbytes / min(times[1:])


def resident() -> int:
    """Bytes of memory that this process holds."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS"))


# ---- the run


def prompt(length: int, seed: int, vocab_size: int) -> list[int]:
    """Made-up ids: the same for both engines, others for every seed."""
    import numpy as np

    ids: list[int] = np.random.default_rng(seed).integers(10, vocab_size - 10, length).tolist()
    return ids


def alternate(turns: int, *measures: Callable[[int], float]) -> list[float]:
    """Medians of measures taken in turn, after one turn that doesn't count."""
    found: list[list[float]] = [[] for _ in measures]
    for turn in range(turns + 1):
        for values, measure in zip(found, measures, strict=True):
            value = measure(turn)
            if turn:
                values.append(value)
            time.sleep(0.05)  # the other's threads stop spinning
    return [median(values) for values in found]


@contextmanager
def busy_process() -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def start_seconds(command: list[str]) -> float:
    """From the start of a process to the first byte of its answer."""
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    process.stdout.read(1)
    seconds = time.perf_counter() - begin
    process.kill()
    process.wait()
    return seconds


def prefilling(engine: Engine, prompts: list[list[int]]) -> Callable[[int], float]:
    """Prompt tokens a second, with another prompt each turn: none is in the prefix cache."""
    return lambda turn: len(prompts[turn]) / engine("prefill", ids=prompts[turn])


def decoding(engine: Engine, ids: list[int], steps: int) -> Callable[[int], float]:
    """Tokens a second behind a prompt that is cached."""
    return lambda _: 1 / engine("decode", ids=ids, steps=steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a .gguf file; the embedded SmolLM2 by default")
    parser.add_argument(
        "--llama-python", help="a Python with llama-cpp-python; without: Octavo alone"
    )
    parser.add_argument("--threads", type=int, default=granted_cores())
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="contexts 32 and 1,024, prefill 512")
    parser.add_argument("--skip-busy", action="store_true", help="no run beside a busy process")
    given = parser.parse_args()
    path = str(resolve_model(given.model))
    checkpoint = open_checkpoint(Path(path))
    vocab_size = checkpoint.config["vocab_size"]
    contexts = CONTEXTS[:2] if given.quick else CONTEXTS
    prefills = PREFILLS[:1] if given.quick else PREFILLS

    ours = octavo(path, given.threads)
    ours_int8 = octavo(path, given.threads, kv_cache_dtype="int8") if not given.quick else None
    theirs = (
        [llama(given.llama_python, path, given.threads, flash) for flash in (True, False)]
        if given.llama_python
        else []
    )
    rows: list[dict[str, Any]] = []

    def row(name: str, unit: str, values: list[float], nbytes: float = 0.0) -> None:
        """Our figure, then llama.cpp's with and without flash attention: the larger counts."""
        best = max(values[1:], default=None)
        share = None
        if nbytes:
            share = nbytes * values[0] / ours("bandwidth", nbytes=int(nbytes))
        rows.append(
            {
                "figure": name,
                "unit": unit,
                "octavo": values[0],
                "llama.cpp": best,
                "ratio": values[0] / best if best else None,
                "of read": share,
            }
        )
        print(_line(rows[-1]), flush=True)

    print(_HEADER)
    for length in prefills:
        ids = [prompt(length, seed, vocab_size) for seed in range(given.turns + 1)]
        measures = [prefilling(engine, ids) for engine in [ours, *theirs]]
        row(f"prefill {length:,}", "tok/s", alternate(given.turns, *measures))
    weights = weights_nbytes(checkpoint)
    for context in contexts:
        ids_ = prompt(context, 1000 + context, vocab_size)
        steps = 64 if context <= 1024 else 32
        measures = [decoding(engine, ids_, steps) for engine in [ours, *theirs]]
        values = alternate(given.turns, *measures)
        kv = kv_bytes(checkpoint.config, 2) * (context + steps / 2)
        row(f"decode at {context:,}", "tok/s", values, weights + kv)
        if ours_int8 is not None and context == CONTEXTS[-1]:
            [value] = alternate(given.turns, decoding(ours_int8, ids_, steps))
            kv = kv_bytes(checkpoint.config, 1) * (context + steps / 2)
            row(f"decode at {context:,}, int8 KV", "tok/s", [value, *values[1:]], weights + kv)
    rows.append({"figure": "resident memory", "unit": "MB"})
    sizes = [ours("resident") / 1e6, *(engine("resident") / 1e6 for engine in theirs[:1])]
    rows[-1] |= {"octavo": sizes[0], "llama.cpp": sizes[1] if theirs else None}
    rows[-1]["ratio"] = sizes[0] / sizes[1] if theirs else None
    print(_line(rows[-1]))
    several = [prompt(CONCURRENT_PROMPT, 50 + i, vocab_size) for i in range(CONCURRENT)]
    measures = [
        lambda _, e=engine: e("concurrent", prompts=several, steps=CONCURRENT_STEPS)
        for engine in [ours, *theirs]
    ]
    row(f"{CONCURRENT} concurrent", "tok/s", alternate(given.turns, *measures))
    if not given.skip_busy:
        ids_ = prompt(32, 1032, vocab_size)
        quiet = next(one["octavo"] for one in rows if one["figure"] == "decode at 32")
        with busy_process():
            measures = [decoding(engine, ids_, 32) for engine in [ours, *theirs]]
            values = alternate(given.turns, *measures)
        row("decode at 32, one busy process", "tok/s", values)
        rows[-1]["of quiet"] = values[0] / quiet
        print(f"{'':34s}{values[0] / quiet:.2f} of the quiet speed")
    for engine in [ours, *theirs, *([] if ours_int8 is None else [ours_int8])]:
        engine.close()

    run = [str(Path(sys.executable).with_name("octavo")), "run", path, "-p", "Once upon a time"]
    start = median(start_seconds([*run, "--max-tokens", "8"]) for _ in range(given.turns))
    rows.append({"figure": "process start to first token", "unit": "s", "octavo": start})
    print(_line(rows[-1]))
    report = {
        "bench": "cpu_engine",
        "model": Path(path).name,
        "threads": given.threads,
        "cpu": _cpu_name(),
        "turns": given.turns,
        "engine": ours.hello,
        "rows": rows,
    }
    print(json.dumps(report))


def kv_bytes(config: dict[str, Any], size: int) -> int:
    """Bytes of keys and values of one token in all layers; windows are not looked at."""
    return (
        2 * size * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    )


_HEADER = f"{'':34s}{'octavo':>10s}{'llama.cpp':>11s}{'ratio':>8s}{'of read':>9s}"


def _line(row: dict[str, Any]) -> str:
    def cell(name: str, width: int, form: str) -> str:
        value = row.get(name)
        return " " * width if value is None else f"{value:>{width}{form}}"

    digits = ".2f" if row["unit"] == "s" else ",.0f"
    name = f"{row['figure']}, {row['unit']}"
    return (
        f"{name:34s}{cell('octavo', 10, digits)}{cell('llama.cpp', 11, digits)}"
        f"{cell('ratio', 8, '.2f')}{cell('of read', 9, '.0%')}"
    )


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--engine"]:
        serve(json.loads(sys.argv[2]))
    else:
        main()
