"""The small ops of the cpu runtime against torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.kernels.logits import reference as logits_reference
from octavo.kernels.logits.cpu import finish_logits
from octavo.kernels.norm.cpu import add_norm
from octavo.kernels.norm.reference import add_rms_norm
from octavo.kernels.program import Program
from octavo.kernels.team import Team

WIDTHS = (1, 15, 16, 17, 80, 576)


def random(*shape):
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("added", ["nothing", "y", "normed y"])
@pytest.mark.parametrize("picked", [False, True])
@pytest.mark.parametrize("num_rows", [7, 131])
def test_add_norm(width, added, picked, num_rows):
    rows = np.random.default_rng(1).permutation(num_rows)[: num_rows // 2].astype(np.int32)
    x, y = random(num_rows, width), random(num_rows, width)[::-1].copy()
    weight, post_weight = random(width), random(width)[::-1].copy()
    stream = torch.from_numpy(x.copy())
    normed = add_rms_norm(
        stream,
        torch.from_numpy(weight),
        1e-5,
        delta=None if added == "nothing" else torch.from_numpy(y),
        post_weight=torch.from_numpy(post_weight) if added == "normed y" else None,
    )
    wanted = rows if picked else np.arange(num_rows)
    found, count = np.full((num_rows, width), np.nan, np.float32), np.array([len(wanted)])
    call = add_norm.bind(
        count=count,
        rows=rows if picked else 0,
        x=x,
        y=0 if added == "nothing" else y,
        post_weight=post_weight if added == "normed y" else 0,
        weight=weight,
        width=width,
        eps=1e-5,
        out=found,
        out_q8=0,
        q8_stride=0,
    )
    Team(2).run(Program([call]))
    np.testing.assert_allclose(x[wanted], stream.numpy()[wanted], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(found[: len(wanted)], normed.numpy()[wanted], rtol=2e-6, atol=1e-6)
    assert np.isnan(found[len(wanted) :]).all()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("cap", [None, 5.0])
def test_finish_logits(width, cap):
    logits = 10 * random(9, width)
    logits[1, width // 2] = np.nan
    logits[2, -1] = np.float32(-np.nan)
    logits[3, 0] = np.inf
    logits[4] = -np.inf
    logits[5] = -3.0
    logits[6] = np.where(np.arange(width) == 0, np.float32(-0.0), np.float32(0.0))
    logits[7, 1:] = -np.inf
    expected, best = logits_reference.finish_logits(torch.from_numpy(logits.copy()), cap)
    found, count = np.full(9, -7, np.int32), np.array([8])
    call = finish_logits.bind(count=count, logits=logits, width=width, cap=cap or 0.0, best=found)
    Team(2).run(Program([call]))
    np.testing.assert_allclose(logits[:8], expected.numpy()[:8], rtol=1e-5, atol=1e-6)
    known = np.argmax(logits[:8], axis=1)
    finite = np.isfinite(logits[np.arange(8), known])
    assert found[:8].tolist() == np.where(finite, known, -1).tolist()
    assert found[:8].tolist() == best[:8].tolist()
    assert found[8] == -7
