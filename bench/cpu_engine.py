"""Octavo's cpu runtime beside llama.cpp: the same GGUF, as many threads, alternating in one run.

    make bench-cpu                # or: python bench/cpu_engine.py --llama-python /path/to/python
    python bench/cpu_engine.py --quick
    python bench/cpu_engine.py --measures decode,int8 --contexts 4096,8064

Each engine is a process of its own that measures on demand, one at a time; llama.cpp is a build of
llama-cpp-python made for this CPU, under the Python that ``--llama-python`` names, and is measured
with flash attention on and off, of which the better counts. Decode figures are tokens a second
behind a prompt that is cached; prefill figures are prompt tokens a second to the first token.
Each is the median of several turns. "of limit" says how near Octavo comes to the machine: the bytes
of a decode step against the bandwidth of reading as many, measured in turn with both engines; the
operations of a prompt's products against the rate of the int8 dot product in registers, measured
after them. Prints a table, then one line of JSON.
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
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

from octavo.bench.matrix_rate import matrix_rate
from octavo.checkpoint import open_checkpoint, resolve_model, weights_nbytes
from octavo.checkpoint.tensor import Checkpoint
from octavo.host import granted_cores

HERE = Path(__file__).parent
CONTEXTS = (32, 1024, 4096, 8064)  # SmolLM2 ends at 8,192
PREFILLS = (512, 2048)
LONGEST = 8192
CONCURRENT, CONCURRENT_PROMPT, CONCURRENT_STEPS = 8, 32, 64
READS = 25  # of a working set, for its bandwidth
MEASURES = ("prefill", "decode", "int8", "memory", "concurrent", "busy", "start")


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

    tasks: dict[str, Callable[..., Any]] = {
        "prefill": prefill,
        "decode": decode,
        "concurrent": concurrent,
        "bandwidth": read_bandwidth,
        "int8_rate": lambda: 1e12 * matrix_rate("cpu", "int8"),
        "resident": resident,
    }
    for line in sys.stdin:
        task = json.loads(line)
        print(json.dumps(tasks[task.pop("task")](**task)), file=answers)


def read_bandwidth(nbytes: int) -> float:
    """Bytes a second that the team reads of so many, over and over: the median of some, as a
    decode's figure is a mean of many steps. Where others use the memory, it moves by a third."""
    import numpy as np

    from octavo.kernels.program import Program
    from octavo.kernels.read.cpu import add_up
    from octavo.kernels.team import team

    numbers = np.ones(nbytes // 8, np.int64)
    call = add_up.bind(numbers=numbers, count=len(numbers), total=np.zeros(1, np.int64))
    program, times = Program([call]), []
    for _ in range(1 + READS):
        begin = time.perf_counter()
        team().run(program)
        times.append(time.perf_counter() - begin)
    return nbytes / median(times[1:])


def resident() -> int:
    """Bytes of memory that this process holds."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS"))


# ---- the run


def prompt(length: int, seed: int, vocab_size: int) -> list[int]:
    """Made-up ids: the same for both engines, others for every seed and length, since what two
    prompts begin with alike is computed once."""
    import numpy as np

    generator = np.random.default_rng((seed, length))
    ids: list[int] = generator.integers(10, vocab_size - 10, length).tolist()
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


def reading(engine: Engine, nbytes: float) -> Callable[[int], float]:
    """How often a second the team reads so many bytes."""
    return lambda _: engine("bandwidth", nbytes=int(nbytes)) / nbytes


class Table:
    """Rows of figures, printed as they come."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        print(f"{'':34s}{'octavo':>10s}{'llama.cpp':>11s}{'ratio':>8s}{'of limit':>10s}")

    def add(
        self,
        figure: str,
        unit: str,
        values: list[float],
        *,
        limit: float | None = None,
        **more: float,
    ) -> None:
        """Our figure, then llama.cpp's with and without flash attention: the larger counts.
        ``limit`` is what ours would be if the machine did nothing but read, or multiply."""
        best = max(values[1:], default=None)
        share = None if limit is None else values[0] / limit
        row = {"figure": figure, "unit": unit, "octavo": values[0], "llama.cpp": best}
        row |= {"ratio": values[0] / best if best else None, "of limit": share, **more}
        self.rows.append(row)

        def cell(name: str, width: int, form: str) -> str:
            value = row[name]
            return " " * width if value is None else f"{value:>{width}{form}}"

        digits = ".2f" if unit == "s" else ",.0f"
        notes = "".join(f"  {name} {value:.2f}" for name, value in more.items())
        print(
            f"{f'{figure}, {unit}':34s}{cell('octavo', 10, digits)}{cell('llama.cpp', 11, digits)}"
            f"{cell('ratio', 8, '.2f')}{cell('of limit', 10, '.0%')}{notes}",
            flush=True,
        )


def main() -> None:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a .gguf file; the embedded SmolLM2 by default")
    parser.add_argument(
        "--llama-python", help="a Python with llama-cpp-python; without: Octavo alone"
    )
    parser.add_argument("--threads", type=int, default=granted_cores())
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="contexts 32 and 1,024, prefill 512")
    parser.add_argument("--measures", default=",".join(MEASURES), help="some of the default")
    parser.add_argument("--contexts", type=numbers, default=CONTEXTS, help="of decode and int8")
    parser.add_argument("--prefills", type=numbers, default=PREFILLS)
    given = parser.parse_args()
    wanted = given.measures.split(",")
    if unknown := set(wanted) - set(MEASURES):
        parser.error(f"--measures {', '.join(sorted(unknown))}: not among {', '.join(MEASURES)}")
    contexts = CONTEXTS[:2] if given.quick else given.contexts
    prefills = PREFILLS[:1] if given.quick else given.prefills
    path = str(resolve_model(given.model))
    checkpoint = open_checkpoint(Path(path))
    vocab_size = checkpoint.config["vocab_size"]

    ours = octavo(path, given.threads)
    with_int8 = "int8" in wanted and not given.quick
    ours_int8 = [octavo(path, given.threads, kv_cache_dtype="int8")] if with_int8 else []
    theirs = []
    if given.llama_python:
        theirs = [llama(given.llama_python, path, given.threads, flash) for flash in (True, False)]
    table = Table()

    if "prefill" in wanted:
        for length in prefills:
            ids = [prompt(length, seed, vocab_size) for seed in range(given.turns + 1)]
            measures = [prefilling(engine, ids) for engine in [ours, *theirs]]
            values = alternate(given.turns, *measures)
            limit = ours("int8_rate") / (2 * layer_weights(checkpoint))
            table.add(f"prefill {length:,}", "tok/s", values, limit=limit)
    weights = weights_nbytes(checkpoint)
    for context in contexts if {"decode", "int8"} & set(wanted) else ():
        ids_ = prompt(context, 1000 + context, vocab_size)
        steps = 64 if context <= 1024 else 32
        mean = context + steps / 2
        sizes_read = [
            weights + kv_bytes(checkpoint.config, size) * mean for size in (2, 1)[: 1 + with_int8]
        ]
        engines = [ours, *ours_int8, *theirs]
        values = alternate(
            given.turns,
            *(decoding(engine, ids_, steps) for engine in engines),
            *(reading(ours, nbytes) for nbytes in sizes_read),
        )
        llamas = values[1 + with_int8 : len(engines)]
        names = [f"decode at {context:,}", f"decode at {context:,}, int8 KV"]
        for name, value, limit in zip(names, values, values[len(engines) :], strict=False):
            table.add(name, "tok/s", [value, *llamas], limit=limit)
    if "memory" in wanted:
        # Fresh processes: a pool that has served other prompts keeps them for the next.
        context, sizes = contexts[-1], []
        fresh = [lambda: octavo(path, given.threads)]
        if given.llama_python:
            fresh.append(lambda: llama(given.llama_python, path, given.threads, True))
        for start_engine in fresh:
            engine = start_engine()
            engine("decode", ids=prompt(context, 1000 + context, vocab_size), steps=8)
            sizes.append(engine("resident") / 1e6)
            engine.close()
        table.add(f"resident memory at {context:,}", "MB", sizes)
    if "concurrent" in wanted:
        several = [prompt(CONCURRENT_PROMPT, 50 + i, vocab_size) for i in range(CONCURRENT)]
        measures = [
            lambda _, e=engine: e("concurrent", prompts=several, steps=CONCURRENT_STEPS)
            for engine in [ours, *theirs]
        ]
        table.add(f"{CONCURRENT} concurrent", "tok/s", alternate(given.turns, *measures))
    if "busy" in wanted:
        ids_ = prompt(32, 1032, vocab_size)
        [quiet] = alternate(given.turns, decoding(ours, ids_, 32))
        with busy_process():
            measures = [decoding(engine, ids_, 32) for engine in [ours, *theirs]]
            values = alternate(given.turns, *measures)
        share = values[0] / quiet
        table.add("decode at 32, one busy process", "tok/s", values, **{"of quiet": share})
    for engine in [ours, *theirs, *ours_int8]:
        engine.close()
    if "start" in wanted:
        run = [str(Path(sys.executable).with_name("octavo")), "run", path, "-p", "Once upon a time"]
        start = median(start_seconds([*run, "--max-tokens", "8"]) for _ in range(given.turns))
        table.add("process start to first token", "s", [start])
    report = {
        "bench": "cpu_engine",
        "model": Path(path).name,
        "threads": given.threads,
        "cpu": _cpu_name(),
        "turns": given.turns,
        "engine": ours.hello,
        "rows": table.rows,
    }
    print(json.dumps(report))


def layer_weights(checkpoint: Checkpoint) -> int:
    """Weights that every token is multiplied with: the matrices of the layers."""
    return sum(
        prod(tensor.shape)
        for name, tensor in checkpoint.tensors.items()
        if ".layers." in name and len(tensor.shape) == 2
    )


def kv_bytes(config: dict[str, Any], size: int) -> int:
    """Bytes of keys and values of one token in all layers; windows are not looked at."""
    return (
        2 * size * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
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
