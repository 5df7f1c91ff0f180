"""Which graphs are captured before their steps come, and when there is time for it."""

from __future__ import annotations

import time

# For how long a step keeps the device busy, at least: a GPU that reaches more is not known to us.
PEAK_FLOPS = 7e14


class CaptureAhead:
    """``decodes`` are the rows and the longest row's tokens of a decode step of each kind,
    ``prompts`` the tokens of a prompt's step of each size; ``num_parameters`` the model's, by which
    a step of prompt tokens takes its time."""

    def __init__(
        self, decodes: list[tuple[int, int]], prompts: list[int], num_parameters: int
    ) -> None:
        self._decodes = decodes
        self._prompts = prompts
        self._token_seconds = 2 * num_parameters / PEAK_FLOPS
        self._busy_until = 0.0  # time.monotonic() when launched steps of prompt tokens may be done
        self.seconds = 0.03  # that the last capture took

    def launched(self, num_tokens: int) -> None:
        """Be told of a step of so many prompt tokens."""
        began = max(time.monotonic(), self._busy_until)
        self._busy_until = began + self._token_seconds * num_tokens

    @property
    def has_time(self) -> bool:
        """Whether the device is busy for longer than a capture takes."""
        return time.monotonic() < self._busy_until - self.seconds

    def next_decode(self, num_rows: int) -> tuple[int, int] | None:
        """Take the kind to capture next where the last step had so many rows: of about as many, of
        more before those of fewer, as rows are added while prompts are read. None: all are taken.
        """
        if not self._decodes:
            return None
        nearest = min(self._decodes, key=lambda kind: (kind[0] < num_rows, abs(kind[0] - num_rows)))
        self._decodes.remove(nearest)
        return nearest

    def next_prompt(self) -> int | None:
        """Take a size of prompts, the shortest first."""
        return self._prompts.pop(0) if self._prompts else None
