"""What does splitting do to a whole model? The time per output token after a long prompt."""

from __future__ import annotations

import gc

import torch

from octavo.llm import LLM
from octavo.sampling_params import SamplingParams
from octavo.verify.checks import Check
from octavo.verify.speed import MAX_LOSS

NEW_TOKENS = 32


def tpot(model: str, candidate: str, device: str, *, quick: bool) -> Check:
    """TPOT with splitting on and off: one request, greedy, a made-up prompt."""
    wanted = 512 if quick else 2048 if device == "cpu" else 32_768
    found: dict[str, float] = {}
    for mode in ("off", "auto"):
        llm = LLM(model, device=device, attention_backend=candidate, split_kv=mode)
        context = min(wanted, llm.report.max_model_len - NEW_TOKENS)
        prompt = {"prompt_token_ids": [100 + i % 50 for i in range(context)]}
        params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
        (output,) = llm.generate(prompt, params, use_tqdm=False)
        metrics = output.metrics
        if metrics.first_token_time is None or metrics.finished_time is None:
            raise RuntimeError("a finished request has no times")
        seconds = metrics.finished_time - metrics.first_token_time
        found[mode] = seconds * 1e3 / (NEW_TOKENS - 1)
        del llm
        gc.collect()
        if device != "cpu":
            torch.cuda.empty_cache()
    ratio = found["auto"] / found["off"]
    return Check(
        f"time per output token of {model}, {context:,} tokens of context",
        {"split ms": found["auto"], "unsplit ms": found["off"], "split / unsplit": ratio},
        f"split / unsplit < {1 + MAX_LOSS:g}",
        ratio < 1 + MAX_LOSS,
    )
