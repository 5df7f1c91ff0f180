"""Which graphs are captured before their steps come, and when."""

from __future__ import annotations

import pytest

from octavo.runtime import capture_ahead
from octavo.runtime.capture_ahead import PEAK_FLOPS, CaptureAhead


def test_there_is_time_while_prompts_keep_the_device_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(capture_ahead.time, "monotonic", lambda: now[0])
    ahead = CaptureAhead([], [], int(PEAK_FLOPS / 2))  # a second a token
    assert not ahead.has_time
    ahead.launched(2)
    ahead.launched(1)  # behind the other
    ahead.seconds = 0.5
    for seconds, has_time in ((0.0, True), (2.4, True), (2.6, False), (9.0, False)):
        now[0] = 100.0 + seconds
        assert ahead.has_time == has_time
    ahead.launched(1)
    assert ahead.has_time


def test_everything_is_taken_once() -> None:
    ahead = CaptureAhead([(1, 64), (1, 128), (4, 64), (8, 64)], [16, 32], 1)
    assert [ahead.next_decode(3) for _ in range(5)] == [(4, 64), (8, 64), (1, 64), (1, 128), None]
    assert [ahead.next_prompt() for _ in range(3)] == [16, 32, None]
