"""`asyncrl launch k8s`: the objects of a run, as YAML for `kubectl apply -f -`.

ConfigMap, Secrets        the configuration; the keys of the run
StatefulSet, Service      the queue; Redis, if the run needs one of its own
JobSet                    the learner: a pod for each node, started again together from the newest checkpoint
Deployments               generators, and each pool
HorizontalPodAutoscaler   more generators while the learner waits for groups
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from asyncrl.cluster.kubernetes.order import CONFIG, REDIS_PORT, PodOrder, in_pods, redis_password
from asyncrl.cluster.kubernetes.pods import (
    ENDS_S,
    NO_RIGHTS,
    Object,
    has_password,
    labels,
    metadata,
    pod_template,
)
from asyncrl.cluster.roles import GENERATORS, Role, fewest_nodes, roles
from asyncrl.config.commented_yaml import render
from asyncrl.config.rules import require
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError
from asyncrl.launch.processes import LEARNER, QUEUE
from asyncrl.rpc.keys import CLIENT_FILE, SERVER_FILE

WAITS, MOST_WAITS = "asyncrl_perf_wait_fraction", "100m"
"""The share of its time that the learner waits for groups, and the share that it may wait."""

JOBSET = "jobset.x-k8s.io/v1alpha2"
REDIS_IMAGE = "redis:7"
NAMED = ("--name", "$(POD_NAME)")


class _Dumper(yaml.SafeDumper):
    """Texts of several lines stay readable."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def as_yaml(objects: list[Object]) -> str:
    return yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, width=1 << 16, allow_unicode=True)


def manifests(config: Config, order: PodOrder) -> list[Object]:
    """All objects of a run, those first that others need. Raises ConfigError for a configuration that cannot work in
    pods."""
    password, keys = redis_password(config), Path(config.queue.keys or "")
    config = in_pods(config, order)
    every = {role.name: role for role in roles(config, order.gpus_per_node > 0)}
    for role in every.values():
        least, most = role.gpus if role.name != LEARNER else 0, order.gpus_per_node
        rule = f"{role.name}: a node must have {least}, for the ranks of one process lie on it together"
        require(
            least <= most, "--gpus-per-node", most, rule, "name larger nodes, or give a process fewer ranks"
        )
    queue, learner, generators = (every.pop(name) for name in (QUEUE, LEARNER, GENERATORS))
    return [
        *_stored(config, order, keys),
        *(_redis(config, order, password) if password is not None else []),
        _service(config, order, QUEUE, int(config.queue.address.rpartition(":")[2])),
        _queue(config, order, queue),
        _learner(config, order, learner),
        _deployment(config, order, generators),
        *(_deployment(config, order, pool) for pool in every.values()),
        *([_autoscaler(config, order)] if order.max_generators is not None else []),
    ]


def _stored(config: Config, order: PodOrder, keys: Path) -> Iterator[Object]:
    """The volume, the configuration, and the keys: that of the server in a secret of its own."""
    if order.claim is None:
        volume = {
            "accessModes": ["ReadWriteMany"],
            "resources": {"requests": {"storage": order.storage}},
        }
        yield _object("v1", "PersistentVolumeClaim", metadata(config, order, "work"), spec=volume)
    text = {Path(CONFIG).name: render(config)}
    if has_password(config):
        yield _secret(config, order, "config", text)
    else:
        yield _object("v1", "ConfigMap", metadata(config, order, "config"), data=text)
    for part, file in (("client-key", CLIENT_FILE), ("server-key", SERVER_FILE)):
        yield _secret(config, order, part, {file: (keys / file).read_text(encoding="ascii")})


def _object(version: str, kind: str, named: Object, **rest: Any) -> Object:
    return {"apiVersion": version, "kind": kind, "metadata": named, **rest}


def _secret(config: Config, order: PodOrder, part: str, texts: Mapping[str, str]) -> Object:
    return _object("v1", "Secret", metadata(config, order, part), type="Opaque", stringData=dict(texts))


def _service(config: Config, order: PodOrder, part: str, port: int) -> Object:
    spec = {"selector": labels(config.run.name, part), "ports": [{"name": part, "port": port}]}
    return _object("v1", "Service", metadata(config, order, part), spec=spec)


def _stateful(config: Config, order: PodOrder, part: str, template: Object, **more: Any) -> Object:
    spec = {
        "serviceName": f"{config.run.name}-{part}",
        "replicas": 1,
        "selector": {"matchLabels": labels(config.run.name, part)},
        "template": template,
        **more,
    }
    return _object("apps/v1", "StatefulSet", metadata(config, order, part, queued=True), spec=spec)


def _queue(config: Config, order: PodOrder, role: Role) -> Object:
    port = config.queue.address.rpartition(":")[2]
    words = role.words(CONFIG, f"queue.address=tcp://0.0.0.0:{port}")
    return _stateful(config, order, QUEUE, pod_template(config, order, role, words))


def _redis(config: Config, order: PodOrder, password: str) -> Iterator[Object]:
    """A server that keeps what it has answered, on a volume of its own."""
    kept = ["--appendonly", "yes", "--appendfsync", "everysec", "--dir", "/data"]
    variable = {"name": f"{config.run.name}-redis", "key": "password"}
    user = {"runAsNonRoot": True, "runAsUser": 999, "runAsGroup": 999, "fsGroup": 999}
    container = {
        "name": "redis",
        "image": REDIS_IMAGE,
        "args": [*kept, "--requirepass", "$(REDIS_PASSWORD)"],
        "env": [{"name": "REDIS_PASSWORD", "valueFrom": {"secretKeyRef": variable}}],
        "ports": [{"name": "redis", "containerPort": REDIS_PORT}],
        "readinessProbe": {"tcpSocket": {"port": "redis"}},
        "securityContext": NO_RIGHTS,
        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
    }
    template = {
        "metadata": {"labels": labels(config.run.name, "redis")},
        "spec": {
            "terminationGracePeriodSeconds": ENDS_S,
            "automountServiceAccountToken": False,
            "securityContext": {**user, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [container],
        },
    }
    volume = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": order.storage}}}
    yield _secret(config, order, "redis", {"password": password})
    yield _service(config, order, "redis", REDIS_PORT)
    yield _stateful(
        config,
        order,
        "redis",
        template,
        volumeClaimTemplates=[{"metadata": {"name": "data"}, "spec": volume}],
    )


def _learner(config: Config, order: PodOrder, role: Role) -> Object:
    """A pod for each node; all of them end with the first that fails. Bad input does not get better by a restart."""
    nodes = learner_nodes(role, order.gpus_per_node)
    share = ["--nodes", str(nodes), "--node", "$(NODE)"] if nodes > 1 else []
    template = pod_template(config, order, role, role.words(CONFIG, "run.resume=true", *share), share=nodes)
    template["spec"]["restartPolicy"] = "Never"
    bad_input = {"containerName": role.verb, "operator": "In", "values": [ConfigError.exit_code]}
    job = {
        "completionMode": "Indexed",
        "completions": nodes,
        "parallelism": nodes,
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": bad_input}]},
        "template": template,
    }
    spec = {
        "failurePolicy": {
            "maxRestarts": config.launch.learner_restarts,
            "rules": [
                {"name": "badInput", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
            ],
        },
        "replicatedJobs": [{"name": "ranks", "replicas": 1, "template": {"spec": job}}],
    }
    return _object(JOBSET, "JobSet", metadata(config, order, LEARNER, queued=True), spec=spec)


def learner_nodes(role: Role, gpus_per_node: int) -> int:
    """The fewest pods that hold the ranks in equal parts; one without GPUs."""
    if not role.gpus:
        return 1
    return fewest_nodes(role.ranks, {"GPU": 1}, [{"GPU": gpus_per_node}] * role.ranks)


def _deployment(config: Config, order: PodOrder, role: Role) -> Object:
    """An autoscaler decides itself how many generators there are."""
    scaled = role.name == GENERATORS and order.max_generators is not None
    spec = {
        **({} if scaled else {"replicas": len(role.processes)}),
        # There may be no room for two at a time, and a model that learns has one process.
        "strategy": {"type": "Recreate"},
        "selector": {"matchLabels": labels(config.run.name, role.name)},
        "template": pod_template(config, order, role, role.words(CONFIG, *NAMED)),
    }
    return _object("apps/v1", "Deployment", metadata(config, order, role.name, queued=True), spec=spec)


def _autoscaler(config: Config, order: PodOrder) -> Object:
    """Generators in proportion to the share of its time that the learner waits for groups."""
    of_run = {"whom": "groups", "app_kubernetes_io_instance": config.run.name}
    waits = {
        "metric": {"name": WAITS, "selector": {"matchLabels": of_run}},
        "target": {"type": "Value", "value": MOST_WAITS},
    }
    slowly = {"type": "Pods", "value": 1, "periodSeconds": 300}
    target = metadata(config, order, GENERATORS)["name"]
    spec = {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": target},
        "minReplicas": config.generator.count,
        "maxReplicas": order.max_generators,
        "metrics": [{"type": "External", "external": waits}],
        "behavior": {
            "scaleUp": {"stabilizationWindowSeconds": 120, "policies": [{**slowly, "periodSeconds": 120}]},
            "scaleDown": {"stabilizationWindowSeconds": 600, "policies": [slowly]},
        },
    }
    return _object(
        "autoscaling/v2", "HorizontalPodAutoscaler", metadata(config, order, GENERATORS), spec=spec
    )
