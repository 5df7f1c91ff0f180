"""What rounding costs in perplexity: the CPU's settings against float32 on dequantised weights.

    python bench/perplexity.py [--model gemma3-270m] [--tokens 8192]

The text is the first three chapters of Alice's Adventures in Wonderland (tests/data/alice.txt), in
pieces of 2,048 tokens that know nothing of each other. Each begins as the tokenizer begins a text:
without its <bos> Gemma 3's perplexity is half as high again, and a few positions decide what
rounding costs. The reference is the eager runtime, exact. Prints a table, then a line of JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import time
from pathlib import Path
from typing import Any

from octavo import LLM, SamplingParams

TEXT = Path(__file__).parents[1] / "tests" / "data" / "alice.txt"
PIECE = 2048
REFERENCE: dict[str, Any] = {"exact": True, "enforce_eager": True}
SETTINGS: dict[str, dict[str, Any]] = {
    "exact": {"exact": True},
    "float32 KV": {"kv_cache_dtype": "float32"},
    "bfloat16 KV": {},
    "int8 KV": {"kv_cache_dtype": "int8"},
}


def perplexity(llm: LLM, num_tokens: int) -> float:
    """Of the text's first ``num_tokens`` tokens."""
    tokenizer = llm.get_tokenizer()
    start = tokenizer.encode("")
    ids = tokenizer.encode(TEXT.read_text(encoding="utf-8"))[len(start) : num_tokens]
    step = PIECE - len(start)
    pieces = [{"prompt_token_ids": start + ids[i : i + step]} for i in range(0, len(ids), step)]
    params = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=0)
    total, count = 0.0, 0
    for output in llm.generate(pieces, params, use_tqdm=False):
        assert output.prompt_logprobs is not None
        for token, entry in zip(
            output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True
        ):
            assert entry is not None
            total -= entry[token].logprob
            count += 1
    return math.exp(total / count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model")
    parser.add_argument("--tokens", type=int, default=8192)
    given = parser.parse_args()
    found: dict[str, float] = {}
    for name, options in {"reference": REFERENCE, **SETTINGS}.items():
        llm = LLM(given.model, max_model_len=PIECE + 1, max_num_seqs=1, **options)
        begin = time.perf_counter()
        found[name] = perplexity(llm, given.tokens)
        seconds = time.perf_counter() - begin
        change = found[name] / found["reference"] - 1
        print(
            f"{name:12s} {found[name]:10.4f} {change:+9.3%}  {seconds:6.1f} s  "
            f"{llm.report.runtime}, {llm.report.precision}",
            flush=True,
        )
        model = llm.report.model
        del llm
        gc.collect()
    print(json.dumps({"bench": "perplexity", "model": model, "tokens": given.tokens, **found}))


if __name__ == "__main__":
    main()
