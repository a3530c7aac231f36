"""The cluster: a connection to it, what it has, and the room that a run holds there."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from asyncrl.cluster.ray.needs import RoleNeed
from asyncrl.cluster.roles import NodeResources
from asyncrl.errors import ConfigError, DeadlineError

COUNTED = ("CPU", "GPU")
ANSWER_S = 10.0
"""For a connection to the head of the cluster."""

LOOK_S = 1
"""Of one wait inside of Ray, which Ctrl-C does not interrupt."""


@dataclass(frozen=True, slots=True)
class Seat:
    """The room of one process, or of the ranks that it has on one node: a bundle of a placement group; without a group
    wherever there is room when it is started."""

    group: Any
    index: int
    need: RoleNeed


@contextmanager
def connected(ray: Any, address: str) -> Iterator[None]:
    """Inside, this process is a driver of the cluster, unless it was one before. Raises ConfigError for an address
    where none answers."""
    if ray.is_initialized():
        yield
        return
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS") or address
    remedy = (
        "start the command on a node of the cluster, with the address that `ray start --head` has printed, or as a "
        "job: ray job submit -- asyncrl train …"
    )
    try:
        _check_address(address)
        ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Ray's own handler aborts with a stack of its own
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        rule = f"no Ray cluster can be joined there ({last_line(error)})"
        raise ConfigError("--ray-address", address, rule, remedy) from None
    try:
        yield
    finally:
        ray.shutdown()


def _check_address(address: str) -> None:
    """Raise ValueError for the address of a proxy, OSError if nobody listens: Ray itself waits for minutes."""
    if "://" in address:
        raise ValueError(
            "it is for clients outside of the cluster; a launcher watches its processes from within"
        )
    host, _, port = address.rpartition(":")
    if port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), ANSWER_S).close()


def node_resources(ray: Any) -> list[NodeResources]:
    """All resources of each node that lives."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


@contextmanager
def reserved(ray: Any, needs: Sequence[RoleNeed], seconds: float) -> Iterator[Mapping[str, Sequence[Seat]]]:
    """Inside, the room of all roles is held. Yields the seats of each process by its name.

    Raises DeadlineError for room that the cluster does not have, or that others hold.
    """
    groups: list[Any] = []
    try:
        for need in needs:
            bundles = [need.bundle] * len(need.processes)
            groups.append(ray.util.placement_group(bundles, strategy=need.strategy))
        _wait(ray, needs, groups, seconds)
        seats: dict[str, list[Seat]] = {}
        for need, group in zip(needs, groups, strict=True):
            for index, process in enumerate(need.processes):
                seats.setdefault(process, []).append(Seat(group, index, need))
        yield seats
    finally:
        for group in groups:
            with suppress(ray.exceptions.RayError):
                ray.util.remove_placement_group(group)


def _wait(ray: Any, needs: Sequence[RoleNeed], groups: Sequence[Any], seconds: float) -> None:
    until = time.monotonic() + seconds
    missing = dict(zip(map(str, needs), groups, strict=True))
    while missing and time.monotonic() < until:
        missing = {text: group for text, group in missing.items() if not group.wait(LOOK_S)}
    if missing:
        detail = f"{cluster_text(ray)}; launch.start_deadline_s={seconds:g} is the limit"
        raise DeadlineError(
            "the launcher", "the Ray cluster", f"room for {', '.join(missing)}", seconds, detail
        )


def cluster_text(ray: Any) -> str:
    """The resources of the cluster, in words.

    'its 2 nodes have CPU 8, GPU 0; free, without what this run holds: CPU 3, GPU 0; the largest has CPU 4, GPU 0'
    """
    nodes = node_resources(ray)
    largest = max(nodes, key=lambda node: [node.get(name, 0) for name in reversed(COUNTED)], default={})
    free = _listed(ray.available_resources())
    have, most = _listed(ray.cluster_resources()), _listed(largest)
    return f"its {len(nodes)} nodes have {have}; free, without what this run holds: {free}; the largest has {most}"


def node_address(ray: Any, seat: Seat) -> str:
    """The IP address of the node that has a seat."""
    table = ray.util.placement_group_table(seat.group)
    node_id = table["bundles_to_node_id"][seat.index]
    return next(str(node["NodeManagerAddress"]) for node in ray.nodes() if node["NodeID"] == node_id)


def last_line(error: BaseException) -> str:
    """The last line of an error's text. In Ray's errors it has the reason."""
    return next(
        (line.strip() for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__
    )


def _listed(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {resources.get(name, 0):g}" for name in COUNTED)
