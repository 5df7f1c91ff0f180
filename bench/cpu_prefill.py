"""Where a prefill step of the cpu runtime goes: each kind of op, of all layers, as a program of its
own, beside the step as one program.

    python bench/cpu_prefill.py [--model FILE] [--tokens 512,2048] [--turns 7] [--kv bfloat16]

Prints medians in ms, the rate of products, and of attention's two products (causal, no row or key
counted that is only padding), beside that of the int8 dot product in the same run.
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from typing import Any

from cpu_engine import prompt

from octavo import LLM, SamplingParams
from octavo.bench.matrix_rate import matrix_rate
from octavo.host import granted_cores
from octavo.kernels.program import Call, Program
from octavo.kernels.team import team


def kind(call: Call) -> str:
    """An op and, of a product, its shape."""
    if call.op.name != "linear":
        return call.op.name
    record = call.record[0]
    sign = {0: "+=" if record["accumulate"] else "="}.get(int(record["activation"]), "gate")
    width = int(record["width"]) * (2 if record["activation"] else 1)
    return f"linear {width} {sign} {int(record['columns'])}"


def operations(name: str, tokens: int, spec: Any) -> float:
    """Multiplications and additions of one of a layer's calls."""
    if name.startswith("linear"):
        _, width, _, columns = name.split()
        return 2.0 * int(width) * int(columns) * tokens
    if name == "prefill":
        return 2.0 * tokens * (tokens + 1) * spec.num_heads * spec.head_dim
    return 0.0


def main() -> None:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model")
    parser.add_argument("--tokens", type=numbers, default=[512, 2048])
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--kv", default="auto")
    parser.add_argument("--threads", type=int, default=granted_cores())
    given = parser.parse_args()
    length = max(given.tokens)
    llm = LLM(
        given.model,
        threads=given.threads,
        kv_cache_dtype=given.kv,
        max_model_len=length + 8,
        max_num_batched_tokens=length,
        max_num_seqs=1,
    )
    runtime: Any = llm._engine._runtime
    crew = team(given.threads)
    for tokens in given.tokens:
        ids = prompt(tokens, 1, runtime.vocab_size)
        once = SamplingParams(temperature=0.0, max_tokens=1)
        llm.generate([{"prompt_token_ids": ids}], once, use_tqdm=False)
        calls = runtime._programs.program(decode=False, prefill=True).calls
        parts: dict[str, list[Call]] = {}
        for call in calls:
            parts.setdefault(kind(call), []).append(call)
        programs = {"the step": Program(calls)}
        programs |= {name: Program(part) for name, part in parts.items()}
        times: dict[str, list[float]] = {name: [] for name in programs}
        for turn in range(given.turns + 1):
            for name, program in programs.items():
                begin = time.perf_counter()
                crew.run(program)
                if turn:
                    times[name].append(time.perf_counter() - begin)
        rate = 1e12 * matrix_rate("cpu", "int8")
        spec = runtime._groups[0].spec
        print(f"{tokens} tokens, int8 rate {rate / 1e9:,.0f} GOPS")
        for name in sorted(times, key=lambda name: -median(times[name])):
            seconds = median(times[name])
            count = len(parts.get(name, []))  # 1: of the head, which is for one token
            done = operations(name, tokens, spec) * count if count > 1 else 0.0
            speed = (
                f"{done / seconds / 1e9:8,.0f} GOPS {done / seconds / rate:5.0%}" if done else ""
            )
            print(f"  {name:24s}{1e3 * seconds:10.1f}{speed}", flush=True)


if __name__ == "__main__":
    main()
