"""Choosing ids on a CPU: the rules of ``engine/sampling.py``, most of them in compiled code."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octavo.engine.sampling import SampleOutput, SamplingBatch, report, sample
from octavo.engine.sampling import draw as draw_exactly
from octavo.kernels.choose.cpu import UNSURE, draw, scratch_bytes
from octavo.kernels.program import Program
from octavo.kernels.team import Team

Float32 = NDArray[np.float32]
Int32 = NDArray[np.int32]


class Sampler:
    """Chooses for one model. Rows whose logits are edited first are numpy's."""

    def __init__(self, vocab_size: int, crew: Team) -> None:
        self._team = crew
        self._scratch_bytes = scratch_bytes(vocab_size)
        self._scratch = np.empty(crew.num_threads * self._scratch_bytes, np.uint8)

    def choose(self, logits: Float32, best: Int32, batch: SamplingBatch) -> SampleOutput:
        """``sample(logits, batch)``, where ``best`` [L] is the index of each row's largest logit
        (-1: it has none that is finite)."""
        if batch.edits_logits:
            return sample(logits, batch)
        if batch.temperature.any():
            token_ids = self._draw(logits, best, batch)
        else:
            token_ids = best[batch.sample_indices]
        return report(logits, batch, token_ids)

    def _draw(self, logits: Float32, best: Int32, batch: SamplingBatch) -> Int32:
        rows = len(batch.sample_indices)
        token_ids = np.empty(rows, np.int32)
        call = draw.bind(
            rows=rows,
            logits=logits,
            width=logits.shape[1],
            best=best,
            indices=batch.sample_indices,
            temperature=batch.temperature,
            top_k=batch.top_k,
            top_p=batch.top_p,
            floor=batch.floor,
            seed=batch.seed,
            choice=batch.choice,
            position=batch.position,
            scratch=self._scratch,
            scratch_bytes=self._scratch_bytes,
            ids=token_ids,
        )
        self._team.run(Program([call]))
        for r in np.flatnonzero(token_ids == UNSURE):
            token_ids[r] = draw_exactly(logits[batch.sample_indices[r]], int(r), batch)
        return token_ids
