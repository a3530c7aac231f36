"""The checks, each a function that returns figures, or raises. They run in a process that has no GPU of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from asyncrl.device import accelerator
from bench.process import ROOT, Process, importing_here

ROUNDS = 5
"""Versions of a measurement, after one that warms up."""

DEADLINE_S = 240.0


class NotHereError(Exception):
    """This machine cannot run the check; the message has the reason."""


@dataclass(frozen=True)
class Place:
    """folder: for files · device: torch's kind · tiny: small models, for the test of the checks themselves"""

    folder: Path
    device: str
    tiny: bool

    @property
    def millions(self) -> int:
        """Size of the model that is sent."""
        return 1 if self.tiny else 500

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"


Check = Callable[[Place], dict[str, float]]


def checksum(place: Place) -> dict[str, float]:
    """The checksum of a version, on the GPU and on the CPU, is one number."""
    with _end(place, "checksum", "checksum", millions=place.millions) as end:
        return dict(end.hears(DEADLINE_S))


def stream(place: Place) -> dict[str, float]:
    """Versions go from a learner's GPU to a generator on the same GPU: snapshot, handles, flip, checksum."""
    return _rounds(place, "auto")


def host(place: Place) -> dict[str, float]:
    """The same over TCP, through host memory, as between machines without NCCL."""
    return _rounds(place, "tcp")


def nccl(place: Place) -> dict[str, float]:
    """The same over NCCL, between two GPUs."""
    if accelerator.kind() != accelerator.CUDA or accelerator.count() < 2:
        raise NotHereError("NCCL joins no two processes on one GPU, and there are not two")
    return _rounds(place, "nccl", generator_gpu=1)


def nccl_alone(place: Place) -> dict[str, float]:
    """A channel of NCCL whose other end never joins ends at its deadline, and the process works on. One GPU will do."""
    if not place.on_gpu or accelerator.kind() != accelerator.CUDA:
        raise NotHereError("there is no GPU that NCCL takes")
    with _end(place, "nccl_alone", "nccl_alone", deadline_s=10.0) as end:
        return dict(end.hears(DEADLINE_S))


def streams(place: Place) -> dict[str, float]:
    """A training step's time (by the device's events) alone, and while a generator takes versions."""
    with _pair(place, "auto") as (learner, generator):
        _round(learner, generator, 1)
        learner.tell({"train": True})
        alone_ms = learner.hears(DEADLINE_S)["step_ms"]
        generator.tell({"follow": True})
        learner.tell({"train": True, "publish_from": 2})
        heard = learner.hears(DEADLINE_S)
        generator.tell({"stop": heard["version"]})
        taken = generator.hears(DEADLINE_S)["versions"]
    if not taken:
        raise RuntimeError("the generator took no version while the learner trained")
    return {
        "step_ms": alone_ms,
        "step_ms_while_sending": heard["step_ms"],
        "ratio": heard["step_ms"] / alone_ms,
        "learner_pause_ms": heard["pause_ms"],
        "versions_taken": taken,
    }


def kill(place: Place) -> dict[str, float]:
    """A generator is killed in the middle of a version; the learner publishes on, and another generator takes it."""
    with ExitStack() as stack:
        learner, endpoint = stack.enter_context(_learner(place, "auto", "kill"))
        other = stack.enter_context(_generator(place, "auto", endpoint, "other"))
        _round(learner, other, 1)
        with _generator(place, "auto", endpoint, "victim", die_at=2) as victim:
            learner.tell({"publish": 2})
            learner.hears(DEADLINE_S)
            victim.tell({"take": 2})
            status = victim.ended(DEADLINE_S)
        if status != -signal.SIGKILL:
            raise RuntimeError(f"the victim ended with status {status}, not in the middle of the version")
        figures = [_round(learner, other, version) for version in range(3, 3 + ROUNDS)]
    return {"gb_per_s_afterwards": median(found["gb_per_s"] for found in figures)}


def memory(place: Place) -> dict[str, float]:
    """Both ends allocate what the weight stream needs by its own account: snapshots, staging, buckets, checksum."""
    with _pair(place, "auto") as (learner, generator):
        for version in (1, 2):
            _round(learner, generator, version)
        learner.tell({"memory": True})
        generator.tell({"memory": True})
        ends = [learner.hears(DEADLINE_S), generator.hears(DEADLINE_S)]
    for end in ends:
        if end["peak_bytes"] > end["expected_bytes"] > 0:
            raise RuntimeError(f"{end['peak_bytes']:,} bytes at the peak, {end['expected_bytes']:,} expected")
    return {
        f"{name}_{key}": end[f"{key}_bytes"] / 1e9
        for name, end in zip(("learner", "generator"), ends, strict=True)
        for key in ("peak", "expected")
    }


def mfu(place: Place) -> dict[str, float]:
    """Training steps of Qwen2 shapes in bf16: the share of the GPU's measured matrix speed that they reach."""
    if not place.on_gpu or place.tiny:
        raise NotHereError("a CPU takes minutes for a step")
    from bench.learner.gpu import measured

    found: dict[str, float] = {}
    for model in ("Qwen2.5-0.5B", "Qwen2.5-1.5B"):
        figures = measured(model, "asyncrl")
        short = model.removeprefix("Qwen2.5-")
        found |= {f"{short} {key}": value for key, value in figures.items()}
    return found


def experts(place: Place) -> dict[str, float]:
    """Products of experts in one call are right, and experts without rows get no gradient. Their time beside a loop."""
    with _end(place, "experts", "experts", tiny=place.tiny) as end:
        return dict(end.hears(DEADLINE_S))


def contracts(place: Place) -> dict[str, float]:
    """The contract tests of the channels, those of the GPU among them."""
    if importlib.util.find_spec("pytest") is None or importlib.util.find_spec("hypothesis") is None:
        raise NotHereError("pytest and hypothesis are not installed")
    words = ["-q", "--tb=short", "-p", "no:cacheprovider", "-o", "addopts="]
    tests = ["tests/contract/sync/test_transport.py", "tests/unit/sync/tensors"]
    _run(place, "contracts", [sys.executable, "-m", "pytest", *words, *(tests[:1] if place.tiny else tests)])
    return {}


def demo(place: Place) -> dict[str, float]:
    """`asyncrl demo`: generator and learner share the GPU, and the model learns to add."""
    words = ["run.versions=5"] if place.tiny else []
    _run(
        place, "demo", [sys.executable, "-m", "asyncrl", "demo", "--dir", str(place.folder / "runs"), *words]
    )
    summary = json.loads((place.folder / "runs" / "demo" / "summary.json").read_text())
    numbers = {key: value for key, value in summary.items() if isinstance(value, int | float)}
    return {key: float(value) for key, value in list(numbers.items())[:6]}


def vllm(place: Place) -> dict[str, float]:
    """vLLM starts on the GPU, takes weights, and its log-probs agree with the learner's."""
    return _demo_by_vllm(place, "vllm")


def vllm_transfer(place: Place) -> dict[str, float]:
    """The same with vLLM's own weight transfer over NCCL, from one GPU to another."""
    if accelerator.kind() != accelerator.CUDA or accelerator.count() < 2:
        raise NotHereError("NCCL joins no two processes on one GPU, and there are not two")
    words = ("sync.backend=vllm", "sync.verify=false", "learner.devices=0", "generator.devices=1")
    return _demo_by_vllm(place, "vllm_transfer", *words)


def _demo_by_vllm(place: Place, name: str, *words: str) -> dict[str, float]:
    if importlib.util.find_spec("vllm") is None:
        raise NotHereError("vLLM is not installed")
    if place.tiny:
        raise NotHereError("the tests have it on a CPU")
    command = [
        sys.executable,
        "-m",
        "asyncrl",
        "demo",
        "--engine",
        "vllm",
        "--dir",
        str(place.folder / name),
        "run.versions=20",
    ]
    _run(place, name, [*command, *words])
    return {}


CHECKS: Mapping[str, Check] = {
    check.__name__: check
    for check in (
        checksum,
        stream,
        host,
        nccl,
        nccl_alone,
        streams,
        kill,
        memory,
        mfu,
        experts,
        contracts,
        demo,
        vllm,
        vllm_transfer,
    )
}


# ---- processes


@contextmanager
def _end(place: Place, role: str, name: str, **said: Any) -> Iterator[Process]:
    log = place.folder / f"{name}.log"
    with Process(["bench.gpu.ends"], log, {"role": role, "device": place.device, **said}) as process:
        yield process


@contextmanager
def _learner(place: Place, backend: str, name: str) -> Iterator[tuple[Process, str]]:
    with _end(place, "learner", f"learner-{name}", millions=place.millions, backend=backend) as learner:
        yield learner, learner.hears(DEADLINE_S)["endpoint"]


@contextmanager
def _generator(place: Place, backend: str, endpoint: str, name: str, **said: Any) -> Iterator[Process]:
    told = {"millions": place.millions, "backend": backend, "endpoint": endpoint, "who": name, **said}
    with _end(place, "generator", f"generator-{name}", **told) as generator:
        generator.hears(DEADLINE_S)
        yield generator


@contextmanager
def _pair(place: Place, backend: str, **said: Any) -> Iterator[tuple[Process, Process]]:
    with (
        _learner(place, backend, backend) as (learner, endpoint),
        _generator(place, backend, endpoint, backend, **said) as generator,
    ):
        yield learner, generator


def _round(learner: Process, generator: Process, version: int) -> dict[str, float]:
    learner.tell({"publish": version})
    published = learner.hears(DEADLINE_S)
    generator.tell({"take": version})
    return {**published, **generator.hears(DEADLINE_S)}


def _rounds(place: Place, backend: str, **said: Any) -> dict[str, float]:
    with _pair(place, backend, **said) as (learner, generator):
        rounds = [_round(learner, generator, version) for version in range(1, 2 + ROUNDS)][1:]
    return {key: median(found[key] for found in rounds) for key in rounds[0]}


def _run(place: Place, name: str, command: list[str]) -> None:
    """RuntimeError with the end of its output where it fails."""
    log = place.folder / f"{name}.log"
    with log.open("w") as output:
        env = {**os.environ, **importing_here()}
        ended = subprocess.run(
            command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, env=env, timeout=600
        )
    if ended.returncode:
        raise RuntimeError(f"{name} ended with {ended.returncode}: {log.read_text()[-1500:]}")
