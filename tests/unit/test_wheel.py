"""What is installed from a wheel knows the presets: `configs/` goes into the package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def installed(site: Path) -> None:
    """Laid out as pyproject.toml says that the wheel is."""
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    places = {name: name for name in wheel["packages"]} | wheel["force-include"]
    for source, place in places.items():
        shutil.copytree(ROOT / source, site / place, ignore=shutil.ignore_patterns("__pycache__"))


def test_a_preset_is_included_far_from_any_checkout(tmp_path: Path) -> None:
    installed(tmp_path / "site")
    (tmp_path / "mine.yaml").write_text(
        "include: [algorithms/dapo.yaml]\nmodel: {path: m}\ntasks: {source: a:b}\nreward: {function: a:b}\n"
    )
    words = [sys.executable, "-m", "asyncrl", "config", "mine.yaml", "generator.max_tokens=256", "--print"]
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "overlong_buffer: 64" in done.stdout
