"""``octavo verify``: what is refused before anything runs."""

from __future__ import annotations

import pytest

from octavo.cli import main


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (["--candidate", "nope"], 1, "attention candidate 'nope' is unknown; the known ones are"),
        (["--soak", "-1"], 1, "soak is -1 minutes"),
        (["--plant", "nothing"], 2, "nothing"),
        (["--device", "tpu"], 2, "tpu"),
    ],
)
def test_refused(arguments, code, named, capsys):
    assert main(["verify", *arguments]) == code
    assert named in capsys.readouterr().err
