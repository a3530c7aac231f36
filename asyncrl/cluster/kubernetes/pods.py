"""The pod of one role.

init container ──keys, for their owner alone──▸ /keys     a secret's files belong to root, and their group reads
                                                          them where others may: the run refuses such keys
container      asyncrl VERB /config/config.yaml …, in /work: the volume of the run
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from asyncrl.cluster.kubernetes.order import CONFIG, KEYS, WORK, PodOrder
from asyncrl.cluster.roles import Role
from asyncrl.config.commented_yaml import render
from asyncrl.config.schema import Config
from asyncrl.launch.processes import LEARNER, QUEUE, process_env
from asyncrl.system.rank_process import LAUNCHED

Object = dict[str, Any]

USER = 1000
ENDS_S = 30
"""For the end of a process, beyond the time that it has for its work."""
PROBE_S = 10
MISSED_PROBES = 6
SECRETS = "/secrets"

COPY_KEYS = f"install -m 600 {SECRETS}/*.key {KEYS}/"
NO_RIGHTS = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def labels(name: str, component: str) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": "asyncrl",
        "app.kubernetes.io/instance": name,
        "app.kubernetes.io/component": component.replace("_", "-"),
    }


def metadata(config: Config, order: PodOrder, part: str, *, queued: bool = False) -> Object:
    """The metadata of an object of the run. queued: whether Kueue admits it"""
    name = f"{config.run.name}-{part}".replace("_", "-")
    kueue = {"kueue.x-k8s.io/queue-name": order.kueue_queue} if queued and order.kueue_queue else {}
    return {
        "name": name,
        "namespace": order.namespace,
        "labels": {**labels(config.run.name, part), **kueue},
    }


def pod_template(config: Config, order: PodOrder, role: Role, words: Sequence[str], share: int = 1) -> Object:
    """words: of the command, after `asyncrl` · share: pods that have the ranks of one process in equal parts"""
    port = config.telemetry.prometheus_port
    scraped = {
        "prometheus.io/scrape": "true",
        "prometheus.io/port": str(port),
        "prometheus.io/path": "/metrics",
    }
    return {
        "metadata": {
            "labels": labels(config.run.name, role.name),
            "annotations": {} if port is None else scraped,
        },
        "spec": {
            "terminationGracePeriodSeconds": math.ceil(_work_s(config, role)) + ENDS_S,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": _security(),
            "initContainers": [_keys_container(order)],
            "containers": [_container(config, order, role, words, share)],
            "volumes": list(_volumes(config, order, role)),
        },
    }


def _work_s(config: Config, role: Role) -> float:
    """Seconds that a process may work on after SIGTERM."""
    if role.name == LEARNER:
        return config.launch.stop_deadline_s + config.checkpoint.deadline_s
    return role.grace_s


def _security() -> Object:
    return {
        "runAsNonRoot": True,
        "runAsUser": USER,
        "runAsGroup": USER,
        "fsGroup": USER,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def _keys_container(order: PodOrder) -> Object:
    return {
        "name": "keys",
        "image": order.image,
        "command": ["sh", "-c", COPY_KEYS],
        "securityContext": NO_RIGHTS,
        "volumeMounts": [
            {"name": "secrets", "mountPath": SECRETS, "readOnly": True},
            {"name": "keys", "mountPath": KEYS},
        ],
    }


def _container(config: Config, order: PodOrder, role: Role, words: Sequence[str], share: int) -> Object:
    mounts = {"work": WORK, "config": CONFIG.rpartition("/")[0], "keys": KEYS, "shm": "/dev/shm"}
    port = config.telemetry.prometheus_port
    ports = {"queue": _port(config)} if role.name == QUEUE else {}
    ports |= {} if port is None else {"metrics": port}
    return {
        "name": role.verb,
        "image": order.image,
        "command": ["asyncrl", *words],
        "workingDir": WORK,
        "env": list(_env(role)),
        **({"envFrom": [{"secretRef": {"name": order.env_secret}}]} if order.env_secret else {}),
        "ports": [{"name": name, "containerPort": number} for name, number in ports.items()],
        "resources": _resources(order, role, share),
        "securityContext": NO_RIGHTS,
        "volumeMounts": [{"name": name, "mountPath": path} for name, path in mounts.items()],
        **_probes(config, role),
    }


def _env(role: Role) -> Iterator[Object]:
    variables = {**process_env(role.threads), "HF_HOME": f"{WORK}/huggingface"}
    del variables[LAUNCHED]  # a process without a launcher looks after its run folder itself
    yield from ({"name": name, "value": value} for name, value in variables.items())
    for name, path in (
        ("POD_NAME", "metadata.name"),
        ("NODE", "metadata.annotations['batch.kubernetes.io/job-completion-index']"),
    ):
        if name == "POD_NAME" or role.name == LEARNER:
            yield {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _resources(order: PodOrder, role: Role, share: int) -> Object:
    requests: Mapping[str, str] = {"cpu": str(role.cpus // share)}
    gpus = {order.gpu_resource: str(role.gpus // share)} if role.gpus else {}
    return {"requests": {**requests, **gpus}, **({"limits": gpus} if gpus else {})}


def _probes(config: Config, role: Role) -> Object:
    """The endpoint for Prometheus answers once a process has loaded, from a thread of the process."""
    probes: Object = {}
    if role.name == QUEUE:
        probes["readinessProbe"] = {"tcpSocket": {"port": "queue"}, "periodSeconds": PROBE_S}
    if config.telemetry.prometheus_port is not None:
        answers = {
            "httpGet": {"path": "/metrics", "port": "metrics"},
            "periodSeconds": PROBE_S,
            "timeoutSeconds": PROBE_S,
        }
        loads = math.ceil(config.launch.load_deadline_s / PROBE_S)
        probes["startupProbe"] = {**answers, "failureThreshold": loads}
        probes["livenessProbe"] = {**answers, "failureThreshold": MISSED_PROBES}
    return probes


def _volumes(config: Config, order: PodOrder, role: Role) -> Iterator[Object]:
    """The queue alone gets the key of the server."""
    name = config.run.name
    secrets = [f"{name}-client-key", *([f"{name}-server-key"] if role.name == QUEUE else [])]
    sources = [{"secret": {"name": secret}} for secret in secrets]
    claim = {"claimName": order.claim or f"{name}-work"}
    yield {"name": "work", "persistentVolumeClaim": claim}
    yield (
        {"name": "config", "secret": {"secretName": f"{name}-config"}}
        if has_password(config)
        else {
            "name": "config",
            "configMap": {"name": f"{name}-config"},
        }
    )
    yield {"name": "secrets", "projected": {"sources": sources}}
    yield {"name": "keys", "emptyDir": {"medium": "Memory"}}
    yield {"name": "shm", "emptyDir": {"medium": "Memory"}}


def has_password(config: Config) -> bool:
    """Whether the configuration is a secret itself."""
    return render(config) != render(config, show_passwords=False)


def _port(config: Config) -> int:
    return int(config.queue.address.rpartition(":")[2])
