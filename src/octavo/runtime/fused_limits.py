"""Which models have fused decode steps, told without torch."""

from __future__ import annotations

from octavo.config import SplitMode
from octavo.models.spec import DecoderSpec


def refusal(spec: DecoderSpec, dtype: str, split_mode: SplitMode) -> str:
    """Why decode steps of few rows can't be fused, whatever their attention, as a phrase for
    people; or nothing."""
    if dtype != "bfloat16":
        return f"the products of a fused step are of bfloat16, not of {dtype}"
    if spec.post_norms:
        return "a fused step adds a sublayer's output at once, and here it is normed before"
    odd = [k for k in (spec.hidden_size, spec.q_size, spec.intermediate_size) if k % 8]
    if odd:
        return f"rows of {odd[0]} weights aren't a multiple of 16 bytes"
    if split_mode == "fixed":
        return "fixed splits are the same in any batch, and larger steps have another kernel"
    return ""
