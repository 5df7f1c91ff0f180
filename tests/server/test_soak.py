"""A minute of many clients, beside the other tests of the server: see ``helpers.soak``."""

from __future__ import annotations

import json
import subprocess

import pytest


@pytest.mark.alone
def test_many_clients(soaking: subprocess.Popen[str]) -> None:
    out, errors = soaking.communicate(timeout=240)
    assert soaking.returncode == 0, errors
    done = json.loads(out.splitlines()[-1])
    assert done["seconds"] == 60
    assert done["clients"] == 64
    assert done["streams"] > 50
