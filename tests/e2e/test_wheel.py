"""A wheel that holds everything, and runs outside the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, as setuptools leaves its build folders in the source tree."""
    source = tmp_path_factory.mktemp("source")
    shutil.copytree(
        ROOT / "src", source / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__")
    )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    target = tmp_path_factory.mktemp("wheel")
    build = ["wheel", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir"]
    subprocess.run([*PIP, *build, str(target), str(source)], check=True)
    (built,) = target.glob("octavo-*.whl")
    return built


def test_the_wheel_holds_every_file_of_the_package(wheel: Path) -> None:
    package = ROOT / "src" / "octavo"
    files = {
        path.relative_to(package.parent).as_posix()
        for path in package.rglob("*")
        if path.is_file() and path.suffix not in {".pyc", ".nbi", ".nbc"}
    }
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.startswith("octavo/")}
        metadata = [name for name in archive.namelist() if ".dist-info/" in name]
    assert packed == files
    assert any(name.endswith("LICENSE") for name in metadata)


def test_the_wheel_runs_outside_the_checkout(wheel: Path, tmp_path: Path) -> None:
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    install = ["install", "--no-deps", "--no-index", "--target", str(site), str(wheel)]
    subprocess.run([*PIP, *install], check=True)

    def python(*arguments: str) -> str:
        result = subprocess.run(
            [sys.executable, *arguments],
            cwd=elsewhere,
            env=os.environ | {"PYTHONPATH": str(site)},
            capture_output=True,
            text=True,
        )
        assert result.returncode == 0, result.stderr
        return result.stdout

    assert python("-c", "import octavo; print(octavo.__file__)").startswith(str(site))
    assert "backends" in python("-m", "octavo", "--help")
    assert "reference" in python("-m", "octavo", "backends")
