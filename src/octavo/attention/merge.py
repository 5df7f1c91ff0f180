"""Merging partial attention outputs: the exact answer from drafts over pieces of the history.

The source is FlashDecoding as told in chapters 3 and 5 of the project's seed text: each segment
hands in its *partial output*, its *segment maximum* and its *segment weight sum*, all three.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np

Array = Any  # numpy.ndarray or torch.Tensor: the same kind comes back as went in


def merge_partials(out: Array, m: Array, l: Array) -> tuple[Array, Array, Array]:
    """Merge partials along the leading axis into one partial.

    ``out`` [P, ..., Dv] are the partial outputs, each of the answer's full size and already
    divided by its own weight sum; ``m`` [P, ...] the segment maxima (of scores after scale and
    soft cap); ``l`` [P, ...] the segment weight sums ``sum(exp(score - m))``. Four steps:

    1. global maximum: ``M = max(m_i)``
    2. discount:       ``d_i = exp(m_i - M)``
    3. vote weight:    ``w_i = d_i * l_i``
    4. weighted mean:  ``sum(w_i * out_i) / sum(w_i)``

    Returns ``(mean, M, sum(w_i))``. That is a partial again, so merging is associative, and its
    weight sum is the denominator that an unsplit softmax would have had. An empty segment is
    ``(0, -inf, 0)`` and changes nothing; where all are empty, or P is 0, so is the answer. An
    attention sink is one more partial, ``(0, sink, 1)``, to be merged once.
    """
    if len(m) == 0:
        return out.sum(0), l.sum(0) - math.inf, l.sum(0)
    xp = _namespace(m)
    global_max = xp.amax(m, 0)
    # Where all segments are empty any finite yardstick will do; -inf - (-inf) would be NaN.
    weight = xp.exp(m - xp.where(global_max == -math.inf, 0.0, global_max)) * l
    weight_sum = weight.sum(0)
    mean = (weight[..., None] * out).sum(0) / xp.where(weight_sum == 0, 1.0, weight_sum)[..., None]
    return mean, global_max, weight_sum


def merge_lse(out: Array, lse: Array) -> tuple[Array, Array]:
    """Merge partials in the form that candidates exchange: ``out`` [P, ..., Dv] and ``lse``
    [P, ...], natural log, ``-inf`` for empty. It is the same merge with ``m = lse, l = 1``.
    """
    xp = _namespace(lse)
    mean, m, l = merge_partials(out, lse, xp.where(lse == -math.inf, 0.0, xp.ones_like(lse)))
    return mean, log_sum_exp(m, l)


def merge_sinks(out: Array, lse: Array, sinks: Array) -> tuple[Array, Array]:
    """Let each head's attention sink join in, as one more partial ``(0, sink, 1)``: ``out``
    [..., H, Dv], ``lse`` [..., H], ``sinks`` [H]. To be done once, when all segments are merged."""
    xp = _namespace(lse)
    sink_lse = xp.broadcast_to(xp.asarray(sinks, dtype=lse.dtype), lse.shape)
    return merge_lse(xp.stack((out, xp.zeros_like(out))), xp.stack((lse, sink_lse)))


def log_sum_exp(m: Array, l: Array) -> Array:
    """``m + ln(l)``: a partial's two numbers as one, ``-inf`` where the segment is empty."""
    xp = _namespace(m)
    return m + xp.log(xp.where(l == 0, 1.0, l))


def natural_lse(lse: Array, *, base: float = math.e) -> Array:
    """A foreign log-sum-exp in our convention: natural log, ``-inf`` for an empty segment.

    ``base`` is that of the foreign logarithm (FlashInfer and TRT-LLM use 2). ``+inf``, which
    FlashAttention 2 and Ascend's operator write for an empty segment, becomes ``-inf``. Belongs
    at the edge of an adapter.
    """
    xp = _namespace(lse)
    return xp.where(lse == math.inf, -math.inf, lse * math.log(base))


def _namespace(array: Array) -> Any:
    """numpy or torch, whichever the array is of. Never imports torch: its caller has."""
    return np if isinstance(array, np.ndarray | np.generic) else sys.modules["torch"]
