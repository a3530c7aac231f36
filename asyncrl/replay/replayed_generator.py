"""One life of a generator, made again: the run's own engine and rollouts, in the recorded order.

    decisions ── step, add, remove, flip ──▸ SlotBatch ── turns ──▸ Rollouts ── scored ──▸ GroupStore
                     │   ▴                                             │
      WeightStore ◂──┘   └──── the request of this name ◂── sample ◂───┘

`advance` follows the decisions until a flip needs a version that the learner has not made yet. The file has no prompts
and no rewards: rollouts, environments and reward functions run again, and must come to the same requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from asyncrl.config.schema import Config
from asyncrl.errors import DivergedError
from asyncrl.generator.agents.task_progress import Keep
from asyncrl.generator.engines.engine import SampleRequest
from asyncrl.generator.engines.transformers.transformers_engine import load_transformers_engine
from asyncrl.generator.leases import DROP_REASONS
from asyncrl.generator.prober import PROBE, probe
from asyncrl.generator.rollouts import Rollouts
from asyncrl.generator.scoring.rewards import Scorer
from asyncrl.models.loading import load_model_config
from asyncrl.probes import prompts
from asyncrl.replay.stores import GroupStore, Published, WeightStore
from asyncrl.sync.tensors.quantization import round_trip
from asyncrl.tasks.stream import TaskStream
from asyncrl.telemetry.decisions import Life
from asyncrl.types import EVAL, Task, Turn

WAIT_S = 120.0
"""Longest wait for a request of the recorded name, before which an environment may act, and for rewards."""


class RecordedEngine:
    """A `Sampler` whose requests wait here until the decisions let them join the batch."""

    def __init__(self) -> None:
        self._waiting: dict[str, SampleRequest] = {}
        self._results: dict[str, asyncio.Future[list[Turn]]] = {}
        self._news = asyncio.Event()

    async def sample(self, request: SampleRequest) -> list[Turn]:
        """See `Sampler`."""
        result: asyncio.Future[list[Turn]] = asyncio.get_running_loop().create_future()
        self._waiting[request.request_id], self._results[request.request_id] = request, result
        self._news.set()
        return await result

    async def request(self, request_id: str) -> SampleRequest:
        """The request of this name, once it is there."""
        while request_id not in self._waiting:
            await self.news()
        return self._waiting.pop(request_id)

    async def news(self) -> None:
        """Wait for another request."""
        self._news.clear()
        await self._news.wait()

    def samples_for(self, job: str) -> bool:
        """Whether samples of the job of this name are awaited."""
        return any(name == job or name.startswith(f"{job}/") for name in self._results)

    def end(self, request_id: str, turns: list[Turn] | None) -> None:
        """None: it was removed, as its lease was lost or its rollout was given up."""
        result = self._results.pop(request_id, None)
        if result is None or result.done():
            return
        if turns is None:
            result.cancel()
        else:
            result.set_result(turns)


class ReplayedGenerator:
    """Raises ConfigError as the parts that it loads.

    life      its decisions
    held_out  the tasks of each evaluation set
    """

    def __init__(
        self,
        life: Life,
        config: Config,
        tokenizer: PreTrainedTokenizerBase,
        tasks: TaskStream,
        held_out: Mapping[str, Sequence[Task]],
        groups: GroupStore,
        weights: WeightStore,
    ) -> None:
        self.name = life.name
        self._items, self._at = life.items, 0
        self._tasks, self._held_out, self._groups, self._weights = tasks, held_out, groups, weights
        self._scorer = Scorer.from_config(config.reward)
        self._scorer.start()
        loaded = load_transformers_engine(config, tokenizer)
        self._batch, self._targets = loaded.batch, loaded.targets
        self._engine = RecordedEngine()
        vocabulary = load_model_config(config.model).get_text_config().vocab_size
        self._rollouts = Rollouts(self._engine, tokenizer, self._scorer, config, vocabulary)
        self._quantization = config.generator.quantization
        self._prompts = prompts(vocabulary, config.generator.max_length)
        self._next: Published | None = None
        self._jobs: dict[str, asyncio.Task[None]] = {}
        self._kept: dict[str, Sequence[bytes]] = {}
        self._threads = torch.get_num_threads()

    @property
    def ended(self) -> bool:
        return self._at == len(self._items)

    @property
    def waits_for(self) -> str:
        """For errors."""
        return f"{self.name} waits for version {self._next.version if self._next else 0}"

    async def advance(self) -> bool:
        """Follow the decisions as far as the weights permit. Returns whether there were any to follow.

        Raises DivergedError if the run comes to another request than the recorded one.
        """
        torch.set_num_threads(self._threads)
        before = self._at
        while not self.ended and await self._follow(*self._items[self._at]):
            self._at += 1
            await asyncio.sleep(0)  # turns that have ended become groups
        return self._at > before

    async def settle(self) -> None:
        """Wait until each task is done, or waits for the engine. Raises the errors of those that are done."""
        while acting := {job for name, job in self._jobs.items() if not self._engine.samples_for(name)}:
            news = asyncio.ensure_future(self._engine.news())
            done, _ = await asyncio.wait({*acting, news}, timeout=WAIT_S, return_when=asyncio.FIRST_COMPLETED)
            news.cancel()
            for job in done & acting:
                if not job.cancelled():
                    job.result()
            if not done:  # a call hangs; in the run too, maybe
                return

    async def _follow(self, kind: str, *values: Any) -> bool:
        """Follow one decision. Returns False for a flip whose version is not made yet."""
        match kind, *values:
            case "step", count, admit:
                self._step(count, admit)
            case "add", request_id:
                self._batch.add(await self._request(request_id))
            case "remove", request_id:
                self._batch.remove(request_id)
                self._engine.end(request_id, None)
            case "weights", lineage, version:
                self._next = Published(lineage, version)
            case "flip", recompute:
                return self._flip(recompute)
            case "kept", request_id, frames:
                self._kept[request_id] = frames
            case "evaluate", request_id, name, start, stop:
                self._begin(request_id, self._evaluate(request_id, name, start, stop))
            case "threads", threads:
                self._threads = threads
                torch.set_num_threads(threads)
        return True

    def _step(self, count: int, admit: bool) -> None:
        for _ in range(count):
            finished = self._batch.step(admit)
            for pieces, sample, turn in self._batch.take_pieces():
                pieces.take(sample, turn)
            for request_id, turns in finished:
                self._engine.end(request_id, turns)

    def _flip(self, recompute: bool) -> bool:
        assert self._next is not None, "a flip follows the name of its version"
        if not self._weights.has(self._next):
            return False
        weights = round_trip(self._weights.take(self._next), self._quantization)
        self._batch.flip(weights, self._targets, self._next.version, recompute)
        return True

    async def _request(self, request_id: str) -> SampleRequest:
        """The request of the recorded name, of a job that is begun if it is new."""
        stream, *numbers = request_id.split("/")
        if stream == PROBE:
            return probe(request_id, int(numbers[-1]), self._prompts, self._rollouts.training)
        job = "/".join([stream, *numbers[:2]])
        if stream != EVAL and job not in self._jobs:
            self._begin(job, self._generate(job, int(numbers[0])))
        request = asyncio.ensure_future(self._engine.request(request_id))
        await asyncio.wait({request, self._jobs[job]}, timeout=WAIT_S, return_when=asyncio.FIRST_COMPLETED)
        if not request.done():
            request.cancel()
            raise DivergedError(
                f"{self.name} had a request {request_id}, and the rollouts made again have none"
            )
        return request.result()

    def _begin(self, job: str, work: Coroutine[Any, Any, None]) -> None:
        self._jobs[job] = asyncio.create_task(work)
        self._jobs[job].add_done_callback(partial(self._ended, job))

    def _ended(self, job: str, work: asyncio.Task[None]) -> None:
        """Forget jobs that have ended well, or were given up."""
        if work.cancelled() or work.exception() is None:
            del self._jobs[job]

    async def _generate(self, job: str, ordinal: int) -> None:
        task = self._tasks.task_at(ordinal)
        try:
            samples = await self._rollouts.sample(task, job, self._kept.pop(job, ()), Keep(_send_nowhere))
            group = await self._rollouts.score(task, samples)
        except tuple(DROP_REASONS):
            return
        self._groups.put(group)

    async def _evaluate(self, job: str, name: str, start: int, stop: int) -> None:
        """Its results are of no use, and its requests fill the batch as they did."""
        chunk = self._held_out[name][start:stop]
        await self._rollouts.evaluate(Task(0, ""), chunk, job, name)

    async def close(self) -> None:
        """Give up what the recorded life has not finished."""
        for job in self._jobs.values():
            job.cancel()
        await asyncio.gather(*self._jobs.values(), return_exceptions=True)
        await self._rollouts.close()
        self._scorer.close()


async def _send_nowhere(frames: Sequence[bytes]) -> None:
    """Parts of tasks that later leases got are in the decisions of the generators that got them."""
