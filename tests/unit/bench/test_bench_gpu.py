"""The checks of a GPU machine, run without one: the same code, on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_nccl import Deaf

from asyncrl.sync.channels import nccl_transport
from bench.gpu import ends, packages
from bench.gpu.page import table
from bench.process import ROOT, importing_here

WITHOUT_A_GPU = (
    "checksum",
    "stream",
    "host",
    "streams",
    "kill",
    "memory",
    "nccl",
    "nccl_alone",
    "mfu",
    "vllm",
    "vllm_transfer",
)


@pytest.mark.slow
def test_each_check_of_the_weight_stream_passes_and_those_that_need_a_gpu_name_the_reason(
    tmp_path: Path,
) -> None:
    found = tmp_path / "found.json"
    words = ["--device", "cpu", "--tiny", "--only", *WITHOUT_A_GPU, "--json", str(found)]
    subprocess.run([sys.executable, "-m", "bench.gpu", *words], cwd=ROOT, check=True, timeout=280)
    results = json.loads(found.read_text())["results"]
    verdicts = {name: verdict for name, (verdict, _, _) in results.items()}
    passed = {name for name, verdict in verdicts.items() if verdict == "pass"}
    assert passed == {"checksum", "stream", "host", "streams", "kill", "memory"}
    assert all(verdicts[name].startswith("skipped: ") for name in {*WITHOUT_A_GPU} - passed)
    assert results["streams"][1]["versions_taken"] > 0


def test_a_channel_whose_other_end_never_joins_costs_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    group, told = Deaf(), list[dict[str, float]]()
    monkeypatch.setattr(nccl_transport, "_new_group", lambda store, meeting: group)
    ends.nccl_alone(SimpleNamespace(tell=told.append), {"device": "cpu", "deadline_s": 0.2})  # type: ignore[arg-type]
    assert group.over.is_set()
    assert told[0]["deadline_s"] == 0.2


def test_the_page_has_a_row_for_each_check_with_its_verdict() -> None:
    lines = table("GPU", {"kill": ("FAIL: it hung\nfor ever", {"gb_per_s": 2.0}, 3.0)}).splitlines()
    assert lines[0] == "# asyncrl on GPU"
    assert "FAIL: it hung for ever | gb_per_s 2 | 3 |" in lines[-1]


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    """A folder with one wheel, of the package measuring-tape."""
    info, folder = "measuring_tape-1.0.dist-info", tmp_path / "wheels"
    folder.mkdir()
    with zipfile.ZipFile(folder / "measuring_tape-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("measuring_tape.py", "LENGTH = 3")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: measuring-tape\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return folder


def test_packages_that_a_machine_lacks_come_from_a_folder_of_wheels(
    wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    required = ["torch>=2.11", "measuring-tape>=1"]
    assert packages.absent(required) == ["measuring-tape>=1"]
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    packages.provide(required, wheels, tmp_path / "target")
    assert packages.absent(required) == []
    assert importing_here()["PYTHONPATH"].split(os.pathsep) == [
        str(ROOT),
        str(tmp_path / "target"),
        "elsewhere",
    ]
    code = "import measuring_tape; print(measuring_tape.LENGTH)"
    env = {**os.environ, **importing_here()}
    assert (
        subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=True).stdout
        == b"3\n"
    )


def test_packages_that_are_nowhere_are_named_with_a_remedy(wheels: Path, tmp_path: Path) -> None:
    with pytest.raises(
        SystemExit, match=r"has no steel-ruler\. With a network: pip install.*make gpu-wheels"
    ):
        packages.provide(["torch", "steel-ruler"], tmp_path / "nothing", tmp_path / "target")


def test_all_packages_of_the_project_are_looked_for() -> None:
    assert {"torch", "transformers", "pyzmq", "omegaconf"} <= {
        one.split(">")[0] for one in packages.requirements()
    }
    assert packages.absent(packages.requirements()) == []
