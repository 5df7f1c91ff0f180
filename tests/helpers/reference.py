"""Judging the engine's answers by transformers in float32, teacher-forced.

One dense forward of a prompt and the answer to it says what the reference would have chosen at each
place, given the ids before it. If that is the answer's own id everywhere, then by induction the
answer is the reference's greedy one, and no token-by-token generation is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import gguf
import numpy as np
import torch
from helpers.checkpoints import Float32, hf_from_checkpoint, model_logits
from numpy.typing import NDArray

from octavo import RequestOutput
from octavo.checkpoint import Checkpoint, WeightTensor
from octavo.outputs import TokenLogprobs

TOLERANCE = 1e-4  # of what is computed in float32, in units of the largest logit


@dataclass(frozen=True)
class Choices:
    """The reference's two best ids for every place of a sequence but its first.

    ``best [N]`` and ``second [N]`` are ids, ``largest [N]`` is the position's largest absolute
    logit, and ``gap [N]`` the distance of the two best logits, in units of it.
    """

    best: NDArray[np.int64]
    second: NDArray[np.int64]
    gap: Float32
    largest: Float32

    def __len__(self) -> int:
        return len(self.best)

    def __getitem__(self, places: slice) -> Choices:
        return Choices(
            self.best[places], self.second[places], self.gap[places], self.largest[places]
        )


def choices(model: Any, ids: Sequence[int]) -> Choices:
    """What a transformers model chooses after each of ``ids`` but the last."""
    logits = torch.from_numpy(model_logits(model, ids)[:-1])
    values, two_best = (x.numpy().T for x in logits.topk(2))
    largest = logits.abs().amax(dim=1).numpy()
    return Choices(*two_best, (values[0] - values[1]) / largest, largest)


def gguf_model(checkpoint: Checkpoint) -> Any:
    """A GGUF as a transformers model (float32), its weights dequantised by the ``gguf`` package."""
    tensors: Any = {name: _ByGguf(weight) for name, weight in checkpoint.tensors.items()}
    return hf_from_checkpoint(replace(checkpoint, tensors=tensors))


@dataclass(frozen=True)
class _ByGguf:
    weight: WeightTensor

    def to_float32(self) -> Float32:
        weight = self.weight
        kind = gguf.GGMLQuantizationType[weight.format]
        array = gguf.quants.dequantize(weight.stored, kind).astype(np.float32, copy=False)
        if weight.row_order is not None:
            array = array[weight.row_order]
        return array.reshape(weight.shape)


def check_greedy(output: RequestOutput, found: Choices) -> None:
    """The answer is the reference's greedy one, id by id; ``found`` is for prompt and answer."""
    num_prompt = len(output.prompt_token_ids)
    answer = output.outputs[0].token_ids
    after = found[num_prompt - 1 :]
    assert len(answer) == len(after)
    for i, (token, best) in enumerate(zip(answer, after.best.tolist(), strict=True)):
        assert token == best, (
            f"token {i} of the answer to {output.prompt!r} is {token}, the reference's is {best}, "
            f"which leads by {after.gap[i]:.1e} of the largest logit"
        )


@dataclass
class Judgement:
    """How a lossy path fares on sequences whose choices are known.

    ``flips`` are the gaps at which it chose another id; ``moved`` is the most by which it moved
    the distance of the reference's two best logits. Both in units of the largest logit.
    """

    positions: int = 0
    flips: list[float] = field(default_factory=list)
    moved: float = 0.0

    def add(self, entries: Sequence[TokenLogprobs], found: Choices) -> None:
        """``entries`` are the path's, by 20 likeliest tokens, at the first places of ``found``."""
        for i, entry in enumerate(entries):
            best, second, gap = int(found.best[i]), int(found.second[i]), float(found.gap[i])
            # Of equal logits, which a 16-bit head often gives, the lower id is chosen.
            if max(entry, key=lambda token: (entry[token].logprob, -token)) != best:
                self.flips.append(gap)
            distance = (entry[best].logprob - entry[second].logprob) / float(found.largest[i])
            self.moved = max(self.moved, abs(distance - gap))
        self.positions += len(entries)

    def __str__(self) -> str:
        return (
            f"{self.positions} positions, {len(self.flips)} other choices (the widest at a gap of "
            f"{max(self.flips, default=0.0):.5f}), gaps moved by {self.moved:.1e} at most"
        )


def check_logprobs(output: RequestOutput, logits: Float32) -> None:
    """The answer is greedy, and every log probability reported, of prompt and answer, is that of
    ``logits [prompt + answer, vocab]``."""
    [answer] = output.outputs
    ids = output.prompt_token_ids + answer.token_ids
    num_prompt = len(output.prompt_token_ids)
    expected = logits[num_prompt - 1 : -1].argmax(axis=1).tolist()
    assert answer.token_ids == expected, f"{answer.token_ids}, the reference's are {expected}"
    assert answer.logprobs is not None
    assert len(answer.logprobs) == len(answer.token_ids)
    entries = list(enumerate(answer.logprobs, start=num_prompt))
    if output.prompt_logprobs is not None:
        assert len(output.prompt_logprobs) == num_prompt
        assert output.prompt_logprobs[0] is None
        entries += enumerate(output.prompt_logprobs[1:], start=1)
    for place, entry in entries:
        assert entry is not None
        _check_entry(entry, ids[place], logits[place - 1])


def _check_entry(entry: TokenLogprobs, token: int, logits: Float32, num_top: int = 20) -> None:
    """``entry`` has ``token`` and the likeliest ones of ``logits [vocab]``, in their order."""
    assert next(iter(entry)) == token
    expected = log_softmax(logits)
    error = max(abs(entry[other].logprob - expected[other]) for other in entry)
    tolerance = TOLERANCE * np.abs(logits).max()
    assert error < tolerance, f"a log probability is off by {error:.1e}, more than {tolerance:.1e}"
    # Tokens that are equal but for rounding may stand for each other; no other is missing.
    left_out = np.delete(expected, list(entry))
    listed = sorted((value.logprob for value in entry.values()), reverse=True)
    assert len(entry) in (num_top, num_top + 1)
    assert left_out.max() < listed[num_top - 1] + 2 * tolerance
    for other, value in entry.items():
        more = int((expected > expected[other] + 2 * tolerance).sum())
        as_many = int((expected > expected[other] - 2 * tolerance).sum())
        assert more < value.rank <= as_many, f"rank {value.rank} of {more + 1} to {as_many}"


def log_softmax(logits: Float32) -> NDArray[np.float64]:
    """Natural log probabilities along the last axis."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result
