"""What carries out a step on a device, as the engine sees it.

A step is two launches, ``forward`` and ``sample``, that return before the device is done; ``wait``
is the only call that blocks. The device carries launches out in their order. What is more than that
a runtime may offer, or not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from octavo.engine.batch import StepBatch
    from octavo.engine.sampling import SampleOutput, SamplingBatch


class Runtime(Protocol):
    """One model on one device, with the KV pools whose block ids the engine hands out."""

    vocab_size: int

    def forward(self, batch: StepBatch) -> None:
        """Launch the model on one batch: write its KV, keep its logits ``[L, vocab_size]`` on the
        device for the :meth:`sample` that follows. L may be 0.

        Where ``batch.input_ids`` is -1, the id is the one that the last :meth:`sample` launched
        chose for row ``batch.id_rows`` of its step. Where that is ``INVALID_TOKEN``, any id will
        do: the row is dropped.
        """

    def sample(self, batch: SamplingBatch) -> Any:
        """Launch the choice of ids from the last forward's logits; returns a handle to wait for.
        Called once after every forward, also where the batch has nothing to sample."""

    def wait(self, handle: Any) -> SampleOutput:
        """Block until the step of this handle is done and return what was chosen."""


@runtime_checkable
class ReportsSplits(Protocol):
    """What a runtime may have besides: how decode attention cut the histories, for the metrics."""

    @property
    def num_splits(self) -> NDArray[np.int32] | None:
        """Segments of each single-token row of the last forward [R], in the first KV group; None
        where they are decided on the device."""


@runtime_checkable
class DecodesWhole(Protocol):
    """What a runtime may have besides: a decode step and its sampling in one launch."""

    def decode(self, batch: StepBatch, sampling: SamplingBatch, *, goes_on: bool) -> Any:
        """:meth:`Runtime.forward` and :meth:`Runtime.sample` of rows of a single token that all
        sample. ``goes_on``: they are the rows of the step launched before, a token further on in
        the block where that one was written."""


@runtime_checkable
class CapturesAhead(Protocol):
    """What a runtime may have besides: something to do for later steps while there is no work."""

    def capture_ahead(self) -> bool:
        """Do some 20 ms of it; False: nothing is left."""


@runtime_checkable
class DecodesAhead(Protocol):
    """What a runtime may have besides: several decode steps in one call, so that what the host does
    between two is done once. The ids are those of single steps."""

    def steps_ahead(self, seq_len: int) -> int:
        """How many steps it would now take at once, if the longest of the rows has ``seq_len``
        tokens in the first of them; below 2: no more than one."""

    def decode_ahead(self, batches: Sequence[StepBatch]) -> list[SampleOutput]:
        """Carry out steps of the same single-token rows, which all take their likeliest id; the
        ids of the second and later steps are those that the step before chose."""
