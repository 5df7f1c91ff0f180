"""The heart: read the history in segments, at once, and merge the partial answers exactly.

``spec`` is the contract, ``splits`` decides the cuts, ``merge`` puts the drafts together,
``candidates`` chooses who computes, ``backends`` are those who can. Nothing here imports torch.
"""

from octavo.attention.merge import merge_lse, merge_partials
from octavo.attention.spec import (
    AttentionBatch,
    AttentionSpec,
    Backend,
    Candidate,
    KVLayout,
    Support,
)
from octavo.attention.splits import SplitCost, SplitPlan, plan_splits

__all__ = [
    "AttentionBatch",
    "AttentionSpec",
    "Backend",
    "Candidate",
    "KVLayout",
    "SplitCost",
    "SplitPlan",
    "Support",
    "merge_lse",
    "merge_partials",
    "plan_splits",
]
