"""The limit on answers that run or wait. An API process refuses by what it was last told, at once
and before any work is done; with several of them only the engine knows exactly."""

from __future__ import annotations

from octavo.errors import OverloadedError


def check_room(num_answers: int, asked: int, max_answers: int | None) -> None:
    """Raise :class:`OverloadedError` where ``asked`` more would be too many; None is no limit."""
    if max_answers is not None and num_answers + asked > max_answers:
        raise OverloadedError(
            f"{num_answers} answers run or wait and this call asks for {asked}, but the limit is "
            f"{max_answers} (max_num_seqs + max_num_queued_reqs); try again later"
        )
