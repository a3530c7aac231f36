"""Images and rented machines: their files name what is there. Nothing here builds or rents any."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from asyncrl.cluster.kubernetes.pods import USER

ROOT = Path(__file__).parents[3]
IMAGES = sorted((ROOT / "packaging" / "docker").glob("*.Dockerfile"))
SKY = {"name", "resources", "envs", "file_mounts", "workdir", "setup", "run"}
"""Fields of SkyPilot's task YAML."""


def installs(text: str) -> list[str]:
    """Parts that packaging/install.py is called with."""
    return re.findall(r"python packaging/install\.py (\w+)", text)


def extras(text: str) -> set[str]:
    listed = re.findall(r"EXTRAS=([\w,]+)|-e '\.\[([\w,]+)\]'", text)
    return {name for pair in listed for each in pair if each for name in each.split(",")}


@pytest.mark.parametrize("file", [*IMAGES, ROOT / "packaging" / "sky.yaml"], ids=lambda file: file.name)
def test_what_is_copied_and_installed_is_there(file: Path) -> None:
    text = file.read_text()
    for sources in re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE):
        assert all((ROOT / source).exists() for source in sources.split()), sources
    parts = (ROOT / "packaging" / "install.py").read_text()
    assert all(f'"{part}":' in parts for part in installs(text))
    project = (ROOT / "pyproject.toml").read_text()
    assert extras(text)
    assert all(re.search(rf"^{name} = \[", project, re.MULTILINE) for name in extras(text))


@pytest.mark.parametrize("file", IMAGES, ids=lambda file: file.name)
def test_an_image_runs_as_the_user_of_the_pods(file: Path) -> None:
    text = file.read_text()
    assert f"USER {USER}\n" in text
    assert f"--uid {USER} " in text


def test_the_rented_machine_has_known_fields_and_a_recipe() -> None:
    task = yaml.safe_load((ROOT / "packaging" / "sky.yaml").read_text())
    assert task.keys() == SKY
    assert (ROOT / task["envs"]["CONFIG"]).is_file()
    assert f"path: {task['envs']['MODEL']}" in (ROOT / task["envs"]["CONFIG"]).read_text()
