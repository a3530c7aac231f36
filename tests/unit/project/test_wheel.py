"""What is installed from a wheel knows the presets and runs the demo: `configs/` goes into the package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


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


def test_the_demo_finds_its_recipes_far_from_any_checkout(tmp_path: Path) -> None:
    installed(tmp_path / "site")
    code = "from asyncrl.demo import demo; print(demo('there', ['run.versions=2']).plan())"
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "there/addition/warm" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_wheel_runs_the_demo_and_the_sdist_gives_the_same_wheel(tmp_path: Path) -> None:
    """The demo in a new environment and in an empty folder."""
    wheel, sdist = (build(kind, ROOT, tmp_path) for kind in ("wheel", "sdist"))
    (tmp_path / "work").mkdir()
    command = environment_with(wheel, tmp_path / "environment")
    words = [str(command), "demo", "run.versions=2", "evaluation.every=2", "launch.learner_restarts=0"]
    assert "only this time" in run(words, tmp_path / "work")
    assert [*(tmp_path / "work/runs/demo/final").glob("model-*.safetensors")]
    shutil.unpack_archive(sdist, tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    assert contents(build("wheel", unpacked, tmp_path / "again")) == contents(wheel)


def build(kind: str, source: Path, into: Path) -> Path:
    run([sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(into)], source)
    (built,) = into.glob({"wheel": "*.whl", "sdist": "*.tar.gz"}[kind])
    return built


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as files:
        return {name: files.read(name) for name in files.namelist()}


def environment_with(built: Path, folder: Path) -> Path:
    """The `asyncrl` command of a new environment that has `built`. What it depends on is that of this environment: a
    path in a .pth file brings no editable installs along, so that this checkout stays out of reach."""
    venv.create(folder, with_pip=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    python = folder / "bin" / "python"
    run(
        [
            str(python),
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-index",
            "--no-deps",
            "--no-build-isolation",
            str(built),
        ],
        folder,
    )
    place = run([str(python), "-c", "import asyncrl; print(asyncrl.__file__)"], folder)
    assert place.startswith(str(site)), place
    return folder / "bin" / "asyncrl"


def run(words: list[str], folder: Path) -> str:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        words, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, done.stdout
    return done.stdout
