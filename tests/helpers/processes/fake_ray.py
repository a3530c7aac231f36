"""What asyncrl.cluster.ray uses of Ray, in this process: actors with methods on threads, nodes that can be lost."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from signal import SIGKILL
from types import SimpleNamespace
from typing import Any


class RayError(Exception):
    pass


class RayActorError(RayError):
    pass


class ActorUnavailableError(RayActorError):
    pass


class GetTimeoutError(RayError, TimeoutError):
    pass


class FakeActor:
    """unreachable: so many questions for events are not answered, before all others are"""

    def __init__(self, made: Any, unreachable: int = 0) -> None:
        self.made, self.unreachable = made, unreachable
        self.dead = threading.Event()
        self._answers: list[Future[Any]] = []

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *words: self._call(method, words))

    def lose(self) -> None:
        """As if its node were gone; Linux kills what a lost actor has started."""
        self.dead.set()
        self.made.send(SIGKILL)
        for answer in self._answers:
            _settle(answer.set_exception, RayActorError("The actor died.\nIts node has died."))

    def _call(self, method: str, words: tuple[Any, ...]) -> Future[Any]:
        answer: Future[Any] = Future()
        self._answers.append(answer)
        if self.dead.is_set():
            answer.set_exception(RayActorError("The actor died.\nIts node has died."))
        elif self.unreachable and method == "event":
            self.unreachable -= 1
            answer.set_exception(ActorUnavailableError("no connection"))
        else:
            work = threading.Thread(target=self._work, args=(answer, method, words), daemon=True)
            work.start()
        return answer

    def _work(self, answer: Future[Any], method: str, words: tuple[Any, ...]) -> None:
        _settle(answer.set_result, getattr(self.made, method)(*words))


class FakeRay:
    """actors: all that were made, in their order · options: with which · removed: placement groups"""

    exceptions = SimpleNamespace(
        RayError=RayError,
        RayActorError=RayActorError,
        ActorUnavailableError=ActorUnavailableError,
        GetTimeoutError=GetTimeoutError,
    )

    def __init__(self, *nodes: dict[str, float]) -> None:
        self.actors: list[FakeActor] = []
        self.options: list[dict[str, Any]] = []
        self.removed: list[Any] = []
        self._nodes = nodes
        strategies = SimpleNamespace(PlacementGroupSchedulingStrategy=lambda **words: words)
        self.util = SimpleNamespace(
            scheduling_strategies=strategies,
            placement_group=self._placement_group,
            remove_placement_group=self.removed.append,
            placement_group_table=lambda group: {"bundles_to_node_id": {0: "node-1"}},
        )

    def is_initialized(self) -> bool:
        return True

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {"NodeID": f"node-{i}", "NodeManagerAddress": f"10.0.0.{i}", "Alive": True, "Resources": node}
            for i, node in enumerate(self._nodes)
        ]

    def cluster_resources(self) -> dict[str, float]:
        return {name: sum(node.get(name, 0) for node in self._nodes) for name in ("CPU", "GPU")}

    def available_resources(self) -> dict[str, float]:
        return {}

    def get(self, answer: Future[Any], timeout: float) -> Any:
        try:
            return answer.result(timeout)
        except FutureTimeout:
            raise GetTimeoutError("no answer") from None

    def kill(self, actor: FakeActor) -> None:
        actor.lose()

    def remote(self, **options: Any) -> Callable[[type], Any]:
        self.options.append(options)

        def actor(kind: type) -> FakeActor:
            self.actors.append(FakeActor(kind()))
            return self.actors[-1]

        return lambda kind: SimpleNamespace(remote=lambda: actor(kind))

    def _placement_group(self, bundles: list[dict[str, float]], strategy: str) -> Any:
        """There at once, if each bundle fits a node."""
        fits = all(any(_fits(bundle, node) for node in self._nodes) for bundle in bundles)
        return SimpleNamespace(bundles=bundles, strategy=strategy, wait=lambda seconds: fits)


def _fits(bundle: dict[str, float], node: dict[str, float]) -> bool:
    return all(node.get(name, 0) >= most for name, most in bundle.items())


def _settle(call: Callable[[Any], None], value: Any) -> None:
    with suppress(InvalidStateError):
        call(value)
