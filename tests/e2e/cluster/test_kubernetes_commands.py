"""The processes of a run as its pods start them: the commands and variables of `asyncrl launch k8s` on this machine."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from processes import (
    Process,
    finished,
    free_port,
    newest_checkpoint,
    started,
    succeeded,
    until,
    until_trained,
    versions,
)

from asyncrl.cluster.kubernetes.manifests import as_yaml, manifests
from asyncrl.cluster.kubernetes.order import KEYS, PodOrder
from asyncrl.config.load import load_config
from asyncrl.rpc.keys import make_keys

pytestmark = pytest.mark.slow


class Pods:
    """The pods of a run, with a folder for what they mount."""

    def __init__(self, config_file: Path, *words: str) -> None:
        self._folder, make = config_file.parent, config_file.parent / "made"
        make_keys(make)
        port = free_port()
        address = f"queue.address=tcp://127.0.0.1:{port}"
        config = load_config(config_file, [f"queue.keys={make}", address, "run.dir=runs", *words])
        self.run = self._folder / "runs" / "it"
        order = PodOrder(image="asyncrl:cpu", gpus_per_node=0)
        self._objects = [*yaml.safe_load_all(as_yaml(manifests(config, order)))]
        self._moved = {
            KEYS: str(self._folder / "keys"),
            "/config/": f"{self._folder}/config/",
            "tcp://it-queue:": "tcp://127.0.0.1:",
            "tcp://0.0.0.0:": "tcp://127.0.0.1:",
            "prometheus_host: 0.0.0.0": "prometheus_host: 127.0.0.1",
            "dir: runs": f"dir: {self._folder / 'runs'}",
        }
        self._mount()

    def _mount(self) -> None:
        for one in self._objects:
            texts = one.get("data") or one.get("stringData") or {}
            for name, text in texts.items():
                folder = self._folder / ("config" if name == "config.yaml" else "secrets")
                folder.mkdir(exist_ok=True)
                (folder / name).write_text(self._here(text) if name == "config.yaml" else text)
                (folder / name).chmod(0o440)
        self._take_keys()

    def _take_keys(self) -> None:
        """As the init container of each pod does it: once for all of them, which share the folder here."""
        (self._folder / "keys").mkdir()
        for file in (self._folder / "secrets").glob("*.key"):
            shutil.copy(file, self._folder / "keys" / file.name)
            (self._folder / "keys" / file.name).chmod(0o600)

    def _here(self, text: str) -> str:
        for there, here in self._moved.items():
            text = text.replace(there, here)
        return text

    def _spec(self, component: str) -> dict[str, Any]:
        for one in self._objects:
            jobs = [job["template"]["spec"] for job in one.get("spec", {}).get("replicatedJobs", ())]
            for spec in [one.get("spec", {}), *jobs]:
                template = spec.get("template", {"metadata": {"labels": {}}})
                if template["metadata"]["labels"].get("app.kubernetes.io/component") == component:
                    return dict(template["spec"])
        raise AssertionError(component)

    @contextmanager
    def started(self, component: str, name: str) -> Iterator[Process]:
        """As the container of this pod does it."""
        spec = self._spec(component)
        (container,) = spec["containers"]
        env = {one["name"]: one.get("value", name) for one in container["env"]}
        words = [self._here(word).replace("$(POD_NAME)", name) for word in container["command"]]
        with started(*words, env={**env, "HF_HOME": str(self._folder / "hf")}) as process:
            yield process


def test_the_processes_of_the_pods_make_a_run_and_go_on_after_an_eviction(config_file: Path) -> None:
    pods = Pods(config_file, "run.versions=30", "queue.deadline_s=60", "placement.rewards.where=pool")
    with ExitStack() as stack:
        others = [
            stack.enter_context(pods.started(component, f"it-{component}-0"))
            for component in ("queue", "generators", "rewards")
        ]
        learner = stack.enter_context(pods.started("learner", "it-learner-ranks-0-0-x"))
        until_trained(pods.run, 2, learner, *others)
        learner.send_signal(signal.SIGTERM)  # its node is drained
        code, printed = finished(learner)
        assert code == 10, printed
    saved = until(lambda: newest_checkpoint(pods.run), "a checkpoint")
    assert saved >= 2
    with ExitStack() as stack:
        for component in ("queue", "generators", "rewards"):
            stack.enter_context(pods.started(component, f"it-{component}-1"))
        succeeded(stack.enter_context(pods.started("learner", "it-learner-ranks-0-0-y")))
    assert versions(pods.run) == [*range(1, 31)]
