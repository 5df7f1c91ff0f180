"""What the engine does on one GPU, through ``LLM.generate``: random weights, real shapes.

    python bench/gpu_engine.py [PART ...] [--models 0.6b,8b] [--budget-s 300] [--out FILE]

Parts: ``tpot`` (one stream: TTFT and ms a token at several contexts), ``nano`` (nano-vllm's
benchmark: 256 requests, input and output 100 to 1,024 random, temperature 0.6), ``steps`` (ms a
token of many streams and the host's part of it, fused at any number of rows and unfused), ``host``
(host time a step and idle share of the GPU at several batch sizes), ``deterministic`` (what that
mode costs beside the fast one: ms a token of 1 and of 64 streams, TTFT of 8K, nano-vllm's
benchmark). A line a figure, JSON at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import tempfile
import time
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median

MODELS = Path(__file__).parent / "models"
FLOORS = {  # bytes a token reads: weights, and KV of one token
    "0.6b": (1.19e9, 114688),
    "8b": (15.14e9, 147456),
}


class Bench:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.deadline = time.monotonic() + arguments.budget_s
        self.found: dict[str, object] = {}

    def left(self) -> float:
        return self.deadline - time.monotonic()

    def note(self, name: str, value: object) -> None:
        print(f"{name}: {value}", flush=True)
        self.keep(name, value)

    def keep(self, name: str, value: object) -> None:
        self.found[name] = value
        if self.arguments.out:
            Path(self.arguments.out).write_text(json.dumps(self.found))

    @contextmanager
    def llm(self, model: str, **options):
        """A loaded model; its memory is free again when the next one is loaded."""
        import gc

        import torch

        from octavo import LLM

        gc.collect()  # what the part before held
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            config = json.loads((MODELS / f"qwen3-{model}" / "config.json").read_text())
            longest = options.get("max_model_len") or 0
            config["max_position_embeddings"] = max(config["max_position_embeddings"], longest)
            if self.arguments.small:
                config |= {"num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 512}
                config |= {"intermediate_size": 128, "num_attention_heads": 4}
                config |= {"num_key_value_heads": 2}
            (Path(folder) / "config.json").write_text(json.dumps(config))
            llm = LLM(
                folder,
                load_format="dummy",
                skip_tokenizer_init=True,
                enforce_eager=self.arguments.eager,
                **{"deterministic": self.arguments.deterministic} | options,
            )
        report = llm.report
        print(
            f"-- {model} {options}: {time.perf_counter() - began:.1f} s, {report.runtime}, "
            f"{report.attention_backend}, {report.kv_cache_tokens:,} tokens of KV, "
            f"{ {name: round(s, 2) for name, s in report.phases.items()} }",
            flush=True,
        )
        yield llm

    def warm(self, model: str) -> None:
        """Only load: compiles what the other parts need, into the cache."""
        options = {"max_num_seqs": 256, "max_num_batched_tokens": self.arguments.batched_tokens}
        with self.llm(model, max_model_len=4096, num_gpu_blocks_override=4096, **options) as llm:
            self.note(f"load {model}", round(llm.report.load_seconds, 1))

    # ---- one stream

    def tpot(self, model: str) -> None:
        from octavo import SamplingParams

        contexts = self.arguments.contexts
        rng = random.Random(0)
        with self.llm(
            model,
            max_model_len=max(contexts) + 512,
            max_num_seqs=1,
            max_num_batched_tokens=self.arguments.batched_tokens,
            enable_prefix_caching=False,
        ) as llm:
            for context in contexts:
                ttfts, tpots = [], []
                for turn in range(4):  # the first two compile and capture
                    if self.left() < 5:
                        return
                    count = 8 if turn < 2 else 129
                    ids = [rng.randrange(500) for _ in range(context)]
                    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
                    [output] = llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
                    metrics = output.metrics
                    if turn >= 2:
                        ttfts.append(metrics.first_token_time - metrics.arrival_time)
                        tpots.append(
                            (metrics.finished_time - metrics.first_token_time) / (count - 1)
                        )
                weights, kv = FLOORS[model]
                floor = (weights + kv * (context + 64)) / 4.70e12
                ms = min(tpots) * 1e3
                self.note(
                    f"tpot {model} {context}",
                    {
                        "ms": round(ms, 4),
                        "all": [round(t * 1e3, 4) for t in tpots],
                        "of_roof": round(floor * 1e3 / ms, 3),
                        "ttft_ms": [round(t * 1e3, 2) for t in ttfts],
                    },
                )

    # ---- many

    def nano(self, model: str) -> None:
        from octavo import SamplingParams

        rng = random.Random(0)
        prompts, params = self.nano_requests(rng)
        with self.llm(
            model,
            max_model_len=4096,
            max_num_seqs=256,
            max_num_batched_tokens=self.arguments.batched_tokens,
        ) as llm:
            warm = SamplingParams(max_tokens=16, ignore_eos=True)
            llm.generate([{"prompt_token_ids": [1, 2, 3]}] * 2, warm, use_tqdm=False)
            for turn in range(self.arguments.turns):
                if self.left() < 10:
                    return
                # New prompts: nothing of the turn before is in the prefix cache.
                for prompt in prompts:
                    prompt["prompt_token_ids"][0] = rng.randint(0, 500)
                    prompt["prompt_token_ids"][1] = turn
                clock, meter = HostClock(llm), PowerMeter()
                before = llm.stats().num_steps
                began = time.perf_counter()
                outputs = llm.generate(prompts, params, use_tqdm=False)
                seconds = time.perf_counter() - began
                generated = sum(len(one.outputs[0].token_ids) for one in outputs)
                steps = llm.stats().num_steps - before
                self.note(
                    f"nano {model} turn {turn}",
                    {
                        "output_tok_s": round(generated / seconds),
                        "seconds": round(seconds, 3),
                        "output": generated,
                        "input": sum(len(one.prompt_token_ids) for one in outputs),
                        "steps": steps,
                        **meter.close(),
                        **clock.close(),
                    },
                )

    def nano_requests(self, rng: random.Random) -> tuple[list, list]:
        from octavo import SamplingParams

        count = 16 if self.arguments.small else 256
        longest = 100 if self.arguments.small else 1024
        low = 10 if self.arguments.small else 100
        last_id = 500 if self.arguments.small else 10000
        prompts = [
            {
                "prompt_token_ids": [
                    rng.randint(0, last_id) for _ in range(rng.randint(low, longest))
                ]
            }
            for _ in range(count)
        ]
        params = [
            SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=rng.randint(low, longest))
            for _ in range(count)
        ]
        return prompts, params

    # ---- what equal bits cost

    def deterministic(self, model: str) -> None:
        fast, fixed = (self.costs(model, deterministic) for deterministic in (False, True))
        for name in fast.keys() & fixed.keys():
            ratio = round(fixed[name] / fast[name], 3)
            both = {"fast": round(fast[name], 4), "deterministic": round(fixed[name], 4)}
            self.note(f"deterministic {model} {name}", both | {"ratio": ratio})

    def costs(self, model: str, deterministic: bool) -> dict[str, float]:
        """Milliseconds, and output tokens a second of nano-vllm's benchmark."""
        from octavo import SamplingParams

        found: dict[str, float] = {}
        rng = random.Random(0)
        long = 512 if self.arguments.small else 8192
        with self.llm(
            model,
            max_model_len=long + 512,
            max_num_seqs=256,
            max_num_batched_tokens=self.arguments.batched_tokens,
            enable_prefix_caching=False,
            deterministic=deterministic,
        ) as llm:

            def run(batch: int, length: int, count: int) -> list:
                prompts = [
                    {"prompt_token_ids": [rng.randrange(500) for _ in range(length)]}
                    for _ in range(batch)
                ]
                params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
                outputs = llm.generate(prompts, params, use_tqdm=False)
                return [output.metrics for output in outputs]

            for batch in (1, 64):
                run(batch, 128, 16)  # compiles and captures
                turns = []
                for _ in range(2):
                    metrics = run(batch, 128, 129)
                    began = max(one.first_token_time for one in metrics)
                    turns.append((max(one.finished_time for one in metrics) - began) / 128 * 1e3)
                found[f"tpot of {batch}"] = min(turns)
            ttfts = []
            for _ in range(3):
                [one] = run(1, long, 1)
                ttfts.append((one.first_token_time - one.arrival_time) * 1e3)
            found[f"ttft of {long}"] = min(ttfts)
            for turn in range(2):  # the second has no sizes to capture
                if self.left() < 20:
                    break
                prompts, params = self.nano_requests(rng)
                began = time.perf_counter()
                outputs = llm.generate(prompts, params, use_tqdm=False)
                seconds = time.perf_counter() - began
                generated = sum(len(one.outputs[0].token_ids) for one in outputs)
                found[f"nano tok/s, turn {turn}"] = generated / seconds
        return found

    # ---- up to how many rows steps should be fused

    def steps(self, model: str) -> None:
        from octavo.runtime import cuda_fused

        streams, lengths = self.arguments.streams, self.arguments.lengths
        most_rows = cuda_fused.most_rows
        cuda_fused.most_rows = lambda spec: max(streams)
        options = {"max_num_seqs": 256, "max_num_batched_tokens": self.arguments.batched_tokens}
        options |= {"max_model_len": max(lengths) + 512, "enable_prefix_caching": False}
        try:
            with self.llm(model, **options) as llm:
                print(
                    "context streams | fused: ms, host us (CPU, launching graphs) | unfused | ratio"
                )
                for length in lengths:
                    for count in streams:
                        if self.left() > 8:
                            self.fused_and_unfused(llm, model, count, length)
        finally:
            cuda_fused.most_rows = most_rows

    def fused_and_unfused(self, llm, model: str, count: int, length: int) -> None:
        """The same streams go on by turns: medians of steps, which leave out those that capture."""
        from octavo import SamplingParams

        rng, warm, timed = random.Random(0), 6, 24
        params = SamplingParams(temperature=0.6, max_tokens=500, ignore_eos=True)
        prompts = [[rng.randrange(500) for _ in range(length)] for _ in range(count)]
        running = [llm._prepare({"prompt_token_ids": ids}, params) for ids in prompts]
        for submission in running:
            llm._start(submission)
        while not all(one.output.outputs[0].token_ids for one in running):
            llm._step()
        runtime = llm._engine._runtime
        ways = runtime._fused
        found: dict[bool, list[dict[str, float]]] = {True: [], False: []}
        for fused in (True, False, False, True):
            runtime._fused = ways if fused else []
            for _ in range(warm):
                llm._step()
            clock, ends = HostClock(llm), [time.perf_counter()]
            for _ in range(timed):
                llm._step()
                ends.append(time.perf_counter())
            host = clock.close()
            ms = median(b - a for a, b in pairwise(ends)) * 1e3
            names = ("host_us_median", "host_cpu_us_median", "graph_us_mean")
            found[fused].append({"ms": ms} | {name: host[name] for name in names})
        runtime._fused = ways
        for submission in running:
            llm._abort(submission)
        means = {
            fused: {name: sum(turn[name] for turn in turns) / len(turns) for name in turns[0]}
            for fused, turns in found.items()
        }
        columns = [
            "{:7.3f} {:5.0f} ({:4.0f}, {:4.0f})".format(*one.values()) for one in means.values()
        ]
        ratio = means[True]["ms"] / means[False]["ms"]
        print(f"{length:7} {count:7} | {columns[0]} | {columns[1]} | {ratio:.3f}", flush=True)
        self.keep(
            f"steps {model} context {length} streams {count}",
            {"fused": means[True], "unfused": means[False], "ratio": round(ratio, 3)},
        )

    # ---- inside a step

    def host(self, model: str) -> None:
        from octavo import SamplingParams

        with self.llm(
            model,
            max_model_len=2048,
            max_num_seqs=256,
            max_num_batched_tokens=self.arguments.batched_tokens,
            enable_prefix_caching=False,
        ) as llm:
            for batch in self.arguments.batches:
                for settings in ({"temperature": 0.6}, {"top_k": 20, "top_p": 0.95}):
                    if self.left() < 8 or (len(settings) == 2 and batch not in (1, 64)):
                        continue
                    params = SamplingParams(max_tokens=100, ignore_eos=True, **settings)
                    prompts = [{"prompt_token_ids": [7, 8, i % 500, 9]} for i in range(batch)]
                    llm.generate(prompts, params, use_tqdm=False)
                    clock = HostClock(llm)
                    began = time.perf_counter()
                    llm.generate(prompts, params, use_tqdm=False)
                    seconds = time.perf_counter() - began
                    self.note(
                        f"host {model} batch {batch} {'filtered' if len(settings) == 2 else ''}",
                        {
                            "ms_a_step": round(seconds * 10, 3),
                            **clock.close(),
                            **self.profile(llm, prompts, params),
                        },
                    )

    def profile(self, llm, prompts, params) -> dict[str, object]:
        """The GPU's idle share while all rows decode, and where its time goes."""
        import torch

        if not torch.cuda.is_available() or not self.arguments.profile:
            return {}
        from torch.profiler import ProfilerActivity
        from torch.profiler import profile as profiler

        engine = llm._engine
        submissions = [llm._prepare(prompt, params) for prompt in prompts]
        for submission in submissions:
            llm._start(submission)
        for _ in range(20):
            llm._step()
        with profiler(activities=[ProfilerActivity.CUDA]) as trace:
            for _ in range(20):
                llm._step()
            torch.cuda.synchronize()
        while engine.has_work:
            llm._step()
        spans = sorted(
            (event.time_range.start, event.time_range.end, event.name)
            for event in trace.events()
            if event.device_type == torch.autograd.DeviceType.CUDA
        )
        if not spans:
            return {"profile": "no events"}
        busy, end = 0.0, spans[0][0]
        gaps: list[float] = []  # in front of what a step begins with
        by_name: dict[str, float] = {}
        previous = ""
        for start, stop, name in spans:
            busy += max(0.0, stop - max(start, end))
            if previous.startswith(("choose_kernel", "finish_kernel")):
                gaps.append(max(0.0, start - end))
            previous = name
            end = max(end, stop)
            by_name[name[:60]] = by_name.get(name[:60], 0.0) + (stop - start) / 20
        top = sorted(by_name.items(), key=lambda item: -item[1])[: self.arguments.top]
        return {
            "idle_share": round(1 - busy / (end - spans[0][0]), 4),
            "idle_between_steps": round(sum(gaps) / (end - spans[0][0]), 4),
            "us_a_step": {name: round(us, 1) for name, us in top},
        }


class PowerMeter:
    """What the GPU draws and how fast it ticks until it is closed, asked ten times a second: at the
    limit of its power a kernel that waits less makes the others slower."""

    def __init__(self) -> None:
        wanted = "--query-gpu=power.draw,clocks.sm,temperature.gpu"
        command = ["nvidia-smi", wanted, "--format=csv,noheader,nounits", "--loop-ms=100"]
        self.process = None
        if shutil.which("nvidia-smi"):
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def close(self) -> dict[str, float]:
        """Means: watts, MHz of the multiprocessors, degrees Celsius."""
        if self.process is None:
            return {}
        self.process.terminate()
        lines = self.process.communicate()[0].splitlines()
        samples = [[*map(float, line.split(","))] for line in lines if line.count(",") == 2]
        means = [round(sum(values) / len(samples)) for values in zip(*samples, strict=True)]
        return dict(zip(("watts", "mhz", "celsius"), means, strict=False))


class HostClock:
    """Where the host's time in a step goes: it hooks the engine's calls until it is closed.

    The host's part of a step is what it doesn't wait for the device in ``wait``. Wall time is told,
    and CPU time of the thread: where a call of the driver waits asleep, the two part."""

    def __init__(self, llm) -> None:
        self.times: dict[str, list[tuple[float, float]]] = {}  # of each call: wall, CPU
        self.undo = []
        engine = llm._engine
        self._hook(engine, "step")
        self._hook(engine._runtime, "forward")
        self._hook(engine._runtime, "sample")
        if hasattr(engine._runtime, "decode"):
            self._hook(engine._runtime, "decode")
        self._hook(engine._runtime, "wait")
        if hasattr(engine._runtime, "_graphs"):
            self._hook(engine._runtime._graphs, "run")
            self._hook(engine._runtime._upload, "array")
        self._hook(engine._scheduler, "schedule")
        self._hook(llm._frontend, "process")

    def _hook(self, owner, name: str) -> None:
        inner = getattr(owner, name)
        times = self.times.setdefault(name, [])

        def timed(*args, **kwargs):
            began, cpu_began = time.perf_counter(), time.thread_time()
            try:
                return inner(*args, **kwargs)
            finally:
                cpu = time.thread_time() - cpu_began
                times.append((time.perf_counter() - began, cpu))

        setattr(owner, name, timed)
        self.undo.append((owner, name))

    def close(self) -> dict[str, object]:
        for owner, name in self.undo:
            delattr(owner, name)
        times = {name: calls for name, calls in self.times.items() if calls}
        steps = [
            [(step[clock] - wait[clock] + process[clock]) * 1e6 for clock in (0, 1)]
            for step, wait, process in zip(
                times["step"], times["wait"], times["process"], strict=False
            )
        ]
        wall, cpu = (round(median(one[clock] for one in steps), 1) for clock in (0, 1))
        return {
            "host_us_median": wall,
            "host_cpu_us_median": cpu,
            "graph_us_mean": round(
                sum(wall for wall, _ in times.get("run", [])) / len(steps) * 1e6, 1
            ),
            "us_median": {
                name: [round(median(call[clock] for call in calls) * 1e6, 1) for clock in (0, 1)]
                for name, calls in times.items()
            },
            "us_mean": {
                name: round(sum(call[0] for call in calls) / len(calls) * 1e6, 1)
                for name, calls in times.items()
            },
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=["tpot", "nano", "steps", "host"])
    parser.add_argument("--models", default="0.6b,8b", type=lambda text: text.split(","))
    parser.add_argument("--contexts", default="128,8192,32768", type=numbers)
    parser.add_argument("--batches", default="1,16,64,256", type=numbers)
    parser.add_argument("--streams", default="16,17,24,32,48,64,96,128", type=numbers)
    parser.add_argument("--lengths", default="300,2100", type=numbers, help="of those streams")
    parser.add_argument("--batched-tokens", default=8192, type=int)
    parser.add_argument("--turns", default=2, type=int)
    parser.add_argument("--top", default=12, type=int)
    parser.add_argument("--budget-s", type=float, default=300)
    parser.add_argument("--eager", action="store_true", help="the eager runtime")
    parser.add_argument("--deterministic", action="store_true", help="in every part")
    parser.add_argument("--small", action="store_true", help="tiny shapes, to try the script")
    parser.add_argument("--no-profile", dest="profile", action="store_false")
    default = os.environ.get("OUT")
    parser.add_argument("--out", default=f"{default}/gpu_engine.json" if default else "")
    arguments = parser.parse_args()
    bench = Bench(arguments)
    for part in arguments.parts:
        for model in arguments.models:
            if bench.left() > 10:
                try:
                    getattr(bench, part)(model)
                except Exception as error:  # the others are still worth their time
                    import traceback

                    traceback.print_exc()
                    bench.note(f"{part} {model}", f"failed: {error}")
    print(json.dumps(bench.found))


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


if __name__ == "__main__":
    main()
