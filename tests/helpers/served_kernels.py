"""Which kernels would served steps compile that loading hasn't? For a GPU that isn't there.

    python -m helpers.served_kernels    # JSON: model -> "nothing", or kernel -> the first steps

Multiplications that are torch's are left out. A process of its own: Triton's interpreter, once
chosen, stays for the whole process.
"""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from helpers.checkpoints import family
from helpers.compile_triton import NoDevice
from helpers.cuda_runtime import load
from triton.runtime import driver

from octavo.checkpoint import open_checkpoint
from octavo.config import EngineConfig
from octavo.runtime.candidates import Model
from octavo.runtime.cuda_compile import note_kernels
from octavo.runtime.cuda_load import make_step, run_largest_steps, run_step, warm_up
from octavo.sampling_params import SamplingParams

MAX_ROWS, MAX_TOKENS, MAX_MODEL_LEN, NUM_BLOCKS = 100, 400, 512, 64
ROWS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64, 65, 85, 86, 99)
QWEN_06B = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
SMALL = {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}


def main() -> None:
    driver.set_active(NoDevice())
    torch.version.cuda = "13.0"
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.nn.functional.linear = lambda x, w, b=None: x.new_empty(*x.shape[:-1], len(w))
    torch.mm = lambda x, w, out=None: x.new_empty(len(x), w.shape[1]) if out is None else out
    torch.bmm = lambda x, w: x.new_empty(*x.shape[:2], w.shape[2])
    found = {
        "fast": missing("qwen3", **QWEN_06B),
        "graphs of prompts": missing("qwen3", short_prefill=True, **QWEN_06B),
        "deterministic": missing("qwen3", deterministic=True, **QWEN_06B),
        "few KV heads": missing("llama", **SMALL),
        "windows": missing("gemma3", num_attention_heads=4, num_key_value_heads=1, head_dim=64),
    }
    print(json.dumps({name: steps or "nothing" for name, steps in found.items()}))


def missing(
    name: str, *, deterministic: bool = False, short_prefill: bool = False, **shape: Any
) -> dict[str, list[str]]:
    with tempfile.TemporaryDirectory() as temporary:
        folder = family(Path(temporary), name, **shape)
        held = load(
            folder,
            dtype="bfloat16",
            num_blocks=NUM_BLOCKS,
            max_rows=MAX_ROWS,
            max_tokens=MAX_TOKENS,
            max_model_len=MAX_MODEL_LEN,
            num_slots=264,
            fused=True,
            deterministic=deterministic,
            short_prefill=short_prefill,
        )
        runtime, groups = held.runtime, held.groups
        config = EngineConfig(
            max_num_seqs=MAX_ROWS, max_num_batched_tokens=MAX_TOKENS, max_model_len=MAX_MODEL_LEN
        )
        model = Model(runtime.spec, open_checkpoint(folder), groups, config, "cuda")

        def load_time() -> None:
            run_largest_steps(runtime, model, NUM_BLOCKS)
            warm_up(runtime, model, NUM_BLOCKS)

        there = {repr(kernel) for kernel in note_kernels(load_time)}
        found: defaultdict[str, list[str]] = defaultdict(list)
        for counts, lengths, params in served_steps():
            step = make_step(counts, lengths, config.block_size, NUM_BLOCKS, model.groups)
            for kernel in note_kernels(partial(run_step, runtime, step, params)):
                if repr(kernel) not in there:
                    prompts = len(counts) - counts.count(1)
                    found[kernel.name].append(f"{counts.count(1)} rows, {prompts} prompts")
        return {name: steps[:4] for name, steps in found.items()}


def served_steps() -> Iterator[tuple[list[int], list[int], SamplingParams]]:
    """Tokens and lengths of rows: some that decode, some of a prompt, or both."""
    plain, filtered = SamplingParams(), SamplingParams(top_k=20, top_p=0.9)
    for rows in ROWS:
        yield [1] * rows, [300] * rows, plain
        yield [1] * rows, [17] * rows, filtered
        for prompts in ([16], [7] * 5):
            if rows + len(prompts) <= MAX_ROWS:
                yield [1] * rows + prompts, [40] * rows + prompts, plain
    for prompts in ([3], [15], [16], [17], [400], [4] * 31, [5] * 33, [2] * 70):
        yield prompts, [n + 64 for n in prompts], plain


if __name__ == "__main__":
    main()
