"""A run on Kubernetes as its user orders it, and the configuration that its pods get.

Config, PodOrder ──▸ in_pods ──▸ Config with addresses of the cluster ──▸ manifests.py
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from asyncrl.cluster.roles import refuse_devices
from asyncrl.config.addresses import is_loopback
from asyncrl.config.rules import require
from asyncrl.config.schema import Config
from asyncrl.rpc.keys import client_keys, server_keys

WORK, CONFIG, KEYS = "/work", "/config/config.yaml", "/keys"
"""In each pod: the claim, which is the working folder; the configuration; the run's keys."""

QUEUE_PORT, REDIS_PORT = 5555, 6379
NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
"""Names of hosts have 63 characters, and the names of the run's pods add to it."""

LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?([KMGTPE]i|[kMGTPE])?")


@dataclass(frozen=True, slots=True)
class PodOrder:
    """image: has `asyncrl` on its PATH · claim: a volume that all pods write to; none: one of `storage` is made
    kueue_queue: of Kueue, in the namespace · env_secret: whose entries become variables, e.g. HF_TOKEN
    gpus_per_node: 0: no rank gets a GPU · gpu_resource: name of one GPU
    max_generators: more than generator.count: the autoscaler may start so many; None: there is none
    """

    image: str
    namespace: str = "default"
    claim: str | None = None
    storage: str = "100Gi"
    kueue_queue: str | None = None
    env_secret: str | None = None
    gpus_per_node: int = 8
    gpu_resource: str = "nvidia.com/gpu"
    max_generators: int | None = None


def in_pods(config: Config, order: PodOrder) -> Config:
    """The configuration of the pods. Raises ConfigError for one that cannot work there."""
    refuse_devices(config, "Kubernetes")
    _check(config, order)
    name = config.run.name
    port = config.queue.address.rpartition(":")[2]
    port = port if port.isdecimal() and int(port) else str(QUEUE_PORT)
    queue = dataclasses.replace(
        config.queue,
        address=f"tcp://{name}-queue:{port}",
        keys=KEYS,
        redis_url=_in_cluster(config.queue.redis_url, name),
    )
    sync = dataclasses.replace(config.sync, redis_url=_in_cluster(config.sync.redis_url, name))
    telemetry = dataclasses.replace(config.telemetry, prometheus_host="0.0.0.0")
    launch = dataclasses.replace(config.launch, dash=False)
    return dataclasses.replace(config, queue=queue, sync=sync, telemetry=telemetry, launch=launch)


def redis_password(config: Config) -> str | None:
    """The password of the Redis that the run brings along; None if it needs none: a URL of this machine is taken for
    one in the cluster."""
    urls = {"queue.redis_url": config.queue.redis_url, "sync.redis_url": config.sync.redis_url}
    own = {key: url for key, url in urls.items() if url and _is_here(url)}
    passwords = {unquote(urlsplit(url).password or "") for url in own.values()}
    for key, url in own.items():
        rule = "is of a Redis that runs beside the pods, where the whole cluster reaches it, so it needs one password"
        remedy = "put the same password into all such URLs, or write the URL of a server elsewhere"
        require("" not in passwords and len(passwords) == 1, key, url, rule, remedy)
    return next(iter(passwords), None)


def _check(config: Config, order: PodOrder) -> None:
    name, run_dir, port = config.run.name, config.run.dir, config.telemetry.prometheus_port
    rule = "names objects and hosts of Kubernetes: at most 40 of a-z, 0-9 and -, a letter first"
    require(NAME.fullmatch(name) is not None, "run.name", name, rule, "set run.name=my-run")
    there = PurePosixPath(WORK, run_dir)
    inside = there.is_relative_to(WORK) and ".." not in there.parts
    rule = f"lies outside of {WORK}, where the pods have the volume that they share"
    require(inside, "run.dir", run_dir, rule, "set run.dir=runs, a folder of this volume")
    rule = "must be set: pods reach the queue over the cluster's network"
    remedy = "make keys with `asyncrl keys DIR`, and set queue.keys=DIR"
    require(config.queue.keys is not None, "queue.keys", None, rule, remedy)
    server_keys(config.queue.keys), client_keys(config.queue.keys)
    host, rule = config.sync.host, "is the address of one machine, and each pod has its own"
    require(host is None, "sync.host", host, rule, "leave it out")
    rule, remedy = "is no name of Kubernetes: at most 63 of a-z, 0-9 and -", "give --namespace my-team"
    require(LABEL.fullmatch(order.namespace) is not None, "--namespace", order.namespace, rule, remedy)
    rule, remedy = "is no size of Kubernetes", "give --storage 100Gi"
    require(QUANTITY.fullmatch(order.storage) is not None, "--storage", order.storage, rule, remedy)
    require(order.image.strip() != "", "--image", order.image, "is empty", "give --image asyncrl:gpu")
    most, count = order.max_generators, config.generator.count
    rule = f"must be above generator.count={count}, which run in any case"
    may = most is None or most > count
    require(may, "--max-generators", most, rule, "name more, or leave it out for a fixed number")
    scales = most is not None
    rule = "is not set, and the autoscaler needs the waits that the learner serves there"
    remedy = "set telemetry.prometheus_port=9400, or leave --max-generators out"
    require(port != 0 and not (scales and port is None), "telemetry.prometheus_port", port, rule, remedy)


def _in_cluster(url: str | None, name: str) -> Any:
    """The URL of a server of this machine as that of the run's Redis; others as they are."""
    if url is None or not _is_here(url):
        return url
    parts = urlsplit(url)
    password = quote(unquote(parts.password or ""), safe="")
    return parts._replace(netloc=f":{password}@{name}-redis:{REDIS_PORT}").geturl()


def _is_here(url: str) -> bool:
    parts = urlsplit(url)
    return parts.scheme == "redis" and is_loopback(parts.hostname or "localhost")
