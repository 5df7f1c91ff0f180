"""What the fused attention kernel takes, told without torch."""

from __future__ import annotations

from octavo.attention.spec import AttentionSpec

MAX_GROUP = 14  # query heads of a KV head: with its key and value they are a tile of 16
NEEDS_HOPPER = "needs an NVIDIA GPU of compute capability 9.0 or more"


def refusal(spec: AttentionSpec) -> str:
    """What of a spec it can't do, as a phrase for people, or nothing."""
    group, rest = divmod(spec.num_heads, spec.num_kv_heads)
    if spec.phase != "decode":
        return "rows have one query token each"
    if spec.dtype not in ("bfloat16", "float16"):
        return f"{spec.dtype} isn't one of bfloat16, float16"
    if spec.kv_dtype != spec.dtype:
        return f"stores keys and values as the queries' {spec.dtype}"
    if rest:
        return f"{spec.num_heads} query heads aren't a multiple of {spec.num_kv_heads}"
    if group > MAX_GROUP:
        return f"{group} query heads a KV head are more than {MAX_GROUP}"
    if spec.v_head_dim != spec.head_dim:
        return f"head_dim {spec.head_dim} isn't v_head_dim {spec.v_head_dim}"
    if spec.head_dim > 256 or spec.head_dim % 8:
        return f"head_dim {spec.head_dim} is no multiple of 8 up to 256"
    return "has no attention sinks" if spec.has_sinks else ""
