"""From logits to token ids: the one set of sampling rules, in numpy.

The rules and their order are vLLM's (the order of equal logits is ours, see below):

1. log probabilities are taken from the logits as the model gave them;
2. banned ids (eos and stop ids until ``min_tokens``), and those that a grammar's mask leaves out,
   get ``-inf``;
3. ``logit_bias`` is added;
4. penalties: repetition (prompt and output; a positive logit is divided, another multiplied), then
   frequency and presence (output only; subtracted);
5. temperature 0 takes the largest logit, and the rest falls away;
6. the temperature divides the distance to the largest logit, so that none can overflow;
7. ``min_p`` keeps tokens at least ``min_p`` times as likely as the likeliest;
8. ``top_k`` keeps the ``k`` likeliest of these;
9. ``top_p`` keeps the fewest of these, likeliest first, whose share reaches ``top_p`` (the token
   that crosses it included; a millionth short counts as reached, for float32 can't tell);
10. the token with the largest sum of scaled logit and Gumbel noise wins, which draws from the
    softmax of what is left (the Gumbel-max trick; the noise is ``engine/philox.py``'s). Where 7 to
    9 are off, and a whole vocabulary is left, this chooses twice: first among bunches, of which
    ``b`` has the tokens ``64 b`` to ``64 b + 63`` and for a score the logarithm of what they weigh
    together, then among the tokens of that bunch. The softmax is the same, for a 64th of the noise.

Equal logits are ordered by id, the lower one first, everywhere. Nothing that one row does is
visible to another: a row's result depends on its logits and its own fields alone.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from octavo.engine.philox import BUNCHES, TOKENS, noise_of
from octavo.outputs import Logprob, TokenLogprobs
from octavo.sampling_params import SamplingParams

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]

INVALID_TOKEN = -1
IMPOSSIBLE_LOGPROB = -9999.0  # OpenAI's value for a token that can't occur; JSON has no -inf

_TOP_P_TOLERANCE = 1e-6
# A token this far below the likeliest one (in scaled logits) can't win, for the noise spans 26,
# and a whole vocabulary of them weighs nothing in top_p: 262,144 * e^-30 = 2e-8.
LOWEST_SCORE = -30.0
BUNCH = 64  # tokens; as many at LOWEST_SCORE weigh e^-25.8, and can't win either
# What a mask adds to eight logits, by the byte of their bits: ten times faster than bit by bit.
_MASK_ADDENDS = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"),
    np.float32(0.0),
    np.float32(-np.inf),
)
_NO_COUNTS = np.empty((3, 0), np.int32)
_FLOAT32_SAFE = 1e30  # parameters beyond it (or its inverse) would make infinities of logits


@dataclass(frozen=True)
class SamplingRow:
    """One sequence that samples a token in this step.

    ``choice`` counts a request's ``n`` answers from 0, ``position`` is the index of the token to
    draw, 0 being the first generated. ``banned_ids`` are the ids that would end the sequence,
    while it is shorter than ``min_tokens``. ``mask`` has a grammar's allowed tokens as bits, the
    lowest bit of a word first.
    """

    params: SamplingParams
    prompt_token_ids: Sequence[int] | Int32
    output_token_ids: Sequence[int] | Int32
    seed: int  # 64 bits
    choice: int
    position: int
    banned_ids: Collection[int] = ()
    mask: NDArray[np.uint32] | None = None  # [ceil(vocab_size / 32)]


@dataclass(frozen=True)
class SamplingBatch:
    """What S rows ask of the sampler, as plain arrays that any process or device can take.

    The ragged parts are flat: entry ``i`` of ``ban_ids`` belongs to row ``ban_rows[i]``, and so
    on; a (row, id) pair occurs once in each. ``count_*`` list the distinct prompt and output ids
    of the rows that have a penalty, with the number of times they occur in the output (0: in the
    prompt only). M of the rows have a grammar: ``masks[i]`` holds the allowed tokens of row
    ``mask_rows[i]``, token ``t`` as bit ``t % 32`` of word ``t // 32``. P of the step's logits
    serve ``prompt_logprobs``: ``prompt_targets`` are the prompt ids that came next there.
    """

    sample_indices: Int32  # [S], places in the step's L logits
    temperature: Float32  # [S], 0: greedy
    top_k: Int32  # [S], vocab_size: off
    top_p: Float32  # [S], 1: off
    floor: Float32  # [S], the lowest score that min_p leaves, LOWEST_SCORE: off
    repetition_penalty: Float32  # [S]
    frequency_penalty: Float32  # [S]
    presence_penalty: Float32  # [S]
    seed: NDArray[np.uint64]  # [S]
    choice: Int32  # [S]
    position: Int32  # [S]
    num_logprobs: Int32  # [S], -1: none wanted, 0: of the taken token only
    ban_rows: Int32
    ban_ids: Int32
    bias_rows: Int32
    bias_ids: Int32
    bias_values: Float32
    count_rows: Int32
    count_ids: Int32
    count_output: Int32
    mask_rows: Int32  # [M]
    masks: NDArray[np.uint32]  # [M, ceil(vocab_size / 32)]
    prompt_indices: Int32  # [P], places in the step's L logits
    prompt_targets: Int32  # [P]
    prompt_top: Int32  # [P], how many of the likeliest to report

    @property
    def edits_logits(self) -> bool:
        """Whether any row has bans, biases, penalties or a mask."""
        edits = self.ban_rows, self.bias_rows, self.count_rows, self.mask_rows
        return any(len(rows) > 0 for rows in edits)


@dataclass(frozen=True)
class SampleOutput:
    """``token_ids`` [S] int32, ``INVALID_TOKEN`` where a row's logits are not finite.

    ``logprobs`` has a dict for each row that wants one: the taken token first, then the likeliest
    ones in order. ``prompt_logprobs`` [P] likewise, with the prompt's own token first; it is
    empty where the logits are not finite. All numbers are finite: of the tokens that the model
    made impossible (logit -inf) only a prompt's own is reported, as ``IMPOSSIBLE_LOGPROB``.
    """

    token_ids: Int32
    logprobs: list[TokenLogprobs | None]
    prompt_logprobs: list[TokenLogprobs]


def make_sampling_batch(
    rows: Sequence[SamplingRow],
    *,
    sample_indices: ArrayLike,
    prompt_indices: ArrayLike = (),
    prompt_targets: ArrayLike = (),
    prompt_top: ArrayLike = (),
    vocab_size: int,
) -> SamplingBatch:
    """Lay the rows' parameters out as arrays. Token ids are below ``vocab_size``, as
    :meth:`SamplingParams.check_vocabulary` ensures; a ban on an id beyond it has no effect."""
    bans = [
        (r, token)
        for r, row in enumerate(rows)
        if row.banned_ids
        for token in sorted(row.banned_ids)
        if token < vocab_size
    ]
    biases = [
        (r, token, bias)
        for r, row in enumerate(rows)
        if row.params.logit_bias
        for token, bias in sorted(row.params.logit_bias.items())
    ]
    counts = [
        _count_tokens(r, row, vocab_size) for r, row in enumerate(rows) if _has_penalty(row.params)
    ]
    count_rows, count_ids, count_output = np.concatenate(counts, axis=1) if counts else _NO_COUNTS
    masks = [(r, row.mask) for r, row in enumerate(rows) if row.mask is not None]
    # One array of each dtype for all rows, since a small array costs as much as a large one.
    floats = [
        (
            min(p.temperature, _FLOAT32_SAFE),
            p.top_p,
            max(math.log(p.min_p), LOWEST_SCORE) if p.min_p > 0 else LOWEST_SCORE,
            min(max(p.repetition_penalty, 1 / _FLOAT32_SAFE), _FLOAT32_SAFE),
            p.frequency_penalty,
            p.presence_penalty,
        )
        for p in (row.params for row in rows)
    ]
    ints = [
        (
            p.top_k if 0 < p.top_k < vocab_size else vocab_size,
            row.choice,
            row.position,
            -1 if p.logprobs is None else p.logprobs,
        )
        for row, p in ((row, row.params) for row in rows)
    ]
    temperature, top_p, floor, repetition, frequency, presence = np.array(
        list(zip(*floats, strict=True)) or [()] * 6, np.float32
    )
    top_k, choice, position, num_logprobs = np.array(
        list(zip(*ints, strict=True)) or [()] * 4, np.int32
    )
    return SamplingBatch(
        sample_indices=np.asarray(sample_indices, np.int32),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        floor=floor,
        repetition_penalty=repetition,
        frequency_penalty=frequency,
        presence_penalty=presence,
        seed=np.array([row.seed for row in rows], np.uint64),
        choice=choice,
        position=position,
        num_logprobs=num_logprobs,
        ban_rows=_int32(r for r, _ in bans),
        ban_ids=_int32(token for _, token in bans),
        bias_rows=_int32(r for r, _, _ in biases),
        bias_ids=_int32(token for _, token, _ in biases),
        bias_values=_float32(bias for _, _, bias in biases),
        count_rows=count_rows,
        count_ids=count_ids,
        count_output=count_output,
        mask_rows=_int32(r for r, _ in masks),
        masks=np.array([mask for _, mask in masks], np.uint32).reshape(-1, -(-vocab_size // 32)),
        prompt_indices=np.asarray(prompt_indices, np.int32),
        prompt_targets=np.asarray(prompt_targets, np.int32),
        prompt_top=np.asarray(prompt_top, np.int32),
    )


def sample(logits: Float32, batch: SamplingBatch) -> SampleOutput:
    """Choose a token for each of the batch's rows from ``logits [L, V]``, which stay as they are.

    Edits are made for all rows at once. The rest goes row by row: it is bound by memory, and one
    row of logits fits a core's cache where a matrix of them doesn't.
    """
    raw = [logits[index] for index in batch.sample_indices]
    token_ids = np.empty(len(raw), np.int32)
    for r, row in enumerate(_edit(raw, batch)):
        token_ids[r] = row.argmax()
        # argmax finds a NaN first, so that one look at the winner judges the whole row.
        if not math.isfinite(row[token_ids[r]]):
            token_ids[r] = INVALID_TOKEN
        elif batch.temperature[r] > 0:
            token_ids[r] = draw(row, r, batch)
    return report(logits, batch, token_ids)


def report(logits: Float32, batch: SamplingBatch, token_ids: Int32) -> SampleOutput:
    """The choice of ``token_ids`` [S] from ``logits [L, V]``, with the log probabilities asked
    for."""
    if not len(batch.prompt_indices) and batch.num_logprobs.max(initial=-1) < 0:
        return SampleOutput(token_ids, [None] * len(token_ids), [])
    raw = [logits[index] for index in batch.sample_indices]
    logprobs = [
        _token_logprobs(row, int(token), int(top)) if top >= 0 and token != INVALID_TOKEN else None
        for row, token, top in zip(raw, token_ids, batch.num_logprobs, strict=True)
    ]
    prompt_logprobs = [
        _token_logprobs(logits[index], int(target), int(top))
        for index, target, top in zip(
            batch.prompt_indices, batch.prompt_targets, batch.prompt_top, strict=True
        )
    ]
    return SampleOutput(token_ids, logprobs, prompt_logprobs)


def _edit(raw: list[Float32], batch: SamplingBatch) -> list[Float32]:
    """Bans, masks, biases and penalties, on copies of the rows that have any."""
    changed = np.unique(
        np.concatenate([batch.ban_rows, batch.bias_rows, batch.count_rows, batch.mask_rows])
    )
    if not len(changed):
        return raw
    block = np.stack([raw[r] for r in changed])

    at = np.searchsorted(changed, batch.ban_rows), batch.ban_ids
    with np.errstate(invalid="ignore"):  # +inf and NaN become NaN, and so stay visible
        block[at] += -np.inf
        for r, mask in zip(np.searchsorted(changed, batch.mask_rows), batch.masks, strict=True):
            addends = _MASK_ADDENDS.take(mask.view(np.uint8), axis=0).reshape(-1)
            block[r] += addends[: block.shape[1]]

    at = np.searchsorted(changed, batch.bias_rows), batch.bias_ids
    block[at] += batch.bias_values

    at = np.searchsorted(changed, batch.count_rows), batch.count_ids
    values = block[at]
    repetition = batch.repetition_penalty[batch.count_rows]
    values = np.where(values > 0, values / repetition, values * repetition)
    values -= batch.frequency_penalty[batch.count_rows] * batch.count_output
    values -= batch.presence_penalty[batch.count_rows] * (batch.count_output > 0)
    block[at] = values

    edited = list(raw)
    for r, row in zip(changed, block, strict=True):
        edited[r] = row
    return edited


def draw(row: Float32, r: int, batch: SamplingBatch) -> int:
    """The token that row ``r`` draws from its edited, finite logits."""
    key = int(batch.seed[r]), int(batch.choice[r]), int(batch.position[r])
    with np.errstate(over="ignore"):  # a tiny temperature sends the others to -inf, as it should
        scores = (row - row.max()) / batch.temperature[r]
    if is_filtered(batch, len(row))[r]:
        ids = _kept(scores, int(batch.top_k[r]), float(batch.top_p[r]), float(batch.floor[r]))
    else:
        ids = _drawn_bunch(scores, *key)
    return int(ids[(scores[ids] + noise_of(TOKENS, ids, *key)).argmax()])


def is_filtered(batch: SamplingBatch, vocab_size: int) -> NDArray[np.bool_]:
    """Which rows [S] have ``min_p``, ``top_k`` or ``top_p``."""
    return (batch.top_k < vocab_size) | (batch.top_p < 1) | (batch.floor > LOWEST_SCORE)


def _drawn_bunch(scores: Float32, seed: int, choice: int, position: int) -> Int64:
    """The ids of the bunch that is drawn."""
    starts = np.arange(0, len(scores), BUNCH)
    weights = np.add.reduceat(np.exp(scores), starts, dtype=np.float64)
    with np.errstate(divide="ignore"):  # a bunch that a grammar forbids has no weight
        sums = np.log(weights) + noise_of(BUNCHES, starts // BUNCH, seed, choice, position)
    first = BUNCH * int(sums.argmax())
    return np.arange(first, min(first + BUNCH, len(scores)))


def _kept(scores: Float32, top_k: int, top_p: float, floor: float) -> Int64:
    """The ids that the filters keep, ascending. Those that can't win are left out too."""
    ids = np.flatnonzero(scores >= floor)
    scores = scores[ids]
    if top_k < len(ids):
        kept = _largest(scores, top_k)
        ids, scores = ids[kept], scores[kept]
    if top_p < 1:
        weights = np.exp(scores)
        total = float(weights.sum(dtype=np.float64))
        # Tokens so light that all of them together fit into what is cut off needn't be sorted.
        heavy = weights[weights >= (1 - top_p) * total / len(weights)]
        mass = np.cumsum(np.sort(heavy)[::-1], dtype=np.float64)
        target = top_p * (1 - _TOP_P_TOLERANCE) * total
        ids = ids[_largest(scores, int(np.searchsorted(mass, target)) + 1)]
    return ids


def _largest(values: Float32, count: int) -> Int64:
    """Indices, ascending, of the ``count`` largest values; of equal ones the first are taken."""
    if count >= len(values):
        return np.arange(len(values))
    if count == 0:
        return np.empty(0, np.int64)
    threshold = np.partition(values, len(values) - count)[len(values) - count]
    above = np.flatnonzero(values > threshold)
    equal = np.flatnonzero(values == threshold)[: count - len(above)]
    return np.sort(np.concatenate([above, equal]))


def _token_logprobs(row: Float32, token: int, top: int) -> TokenLogprobs:
    """Log probabilities of ``token`` and of the ``top`` likeliest; a rank is one more than the
    number of larger logits, so that equal ones share it."""
    best = row.max()
    if not math.isfinite(best):
        return {}
    log_sum = float(best) + math.log(np.exp(row - best).sum(dtype=np.float64))
    value = row[token]
    logprob = float(value) - log_sum if math.isfinite(value) else IMPOSSIBLE_LOGPROB
    result = {token: Logprob(logprob, int(np.count_nonzero(row > value)) + 1)}
    likeliest = _largest(row, top)
    likeliest = likeliest[np.argsort(-row[likeliest], kind="stable")]
    values = row[likeliest]
    # All logits larger than one of the likeliest are among them.
    ranks = np.searchsorted(-values, -values) + 1
    for other, value, rank in zip(likeliest, values, ranks, strict=True):
        if math.isfinite(value):
            result.setdefault(int(other), Logprob(float(value) - log_sum, int(rank)))
    return result


def _has_penalty(params: SamplingParams) -> bool:
    return bool(
        params.repetition_penalty != 1.0 or params.frequency_penalty or params.presence_penalty
    )


def _count_tokens(r: int, row: SamplingRow, vocab_size: int) -> Int32:
    """``[3, N]``: row number, token id and times in the output, for each id seen in the row."""
    output = np.bincount(np.asarray(row.output_token_ids, np.int64), minlength=vocab_size)
    seen = output > 0
    if row.params.repetition_penalty != 1.0:
        seen[np.asarray(row.prompt_token_ids, np.int64)] = True
    ids = np.flatnonzero(seen)
    return np.stack([np.full_like(ids, r), ids, output[ids]]).astype(np.int32)


def _int32(values: Iterable[int]) -> Int32:
    return np.fromiter(values, np.int32)


def _float32(values: Iterable[float]) -> Float32:
    return np.fromiter(values, np.float32)
