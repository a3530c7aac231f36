"""The generator of the bench: python -m bench.generator.pool. A worker, as a run starts it; now and then it is held
back, and its engine measured alone, with as many requests at once."""

from __future__ import annotations

import asyncio
import gc
import itertools
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import numpy as np

from asyncrl.generator import process
from asyncrl.generator.engines.engine import SampleRequest
from asyncrl.generator.sample_limit import SampleLimit
from asyncrl.telemetry.status import ProcessStatus
from asyncrl.types import Sampling
from bench.generator.model import LOADS, config_of, task_at
from bench.generator.watched import COMPARED, Measured, Watched
from bench.process import Talk

WARM_S = 5.0


async def main() -> None:
    talk = Talk()
    said = talk.hears()
    load = LOADS[said["load"]]
    config = config_of(Path(said["folder"]), said["engine"], said["address"], load)
    watched: list[Watched] = []
    load_engine = process.load_engine

    def load_watched(*args: Any) -> Any:
        watched.append(Watched(load_engine(*args), load))
        return watched[0]

    process.load_engine = cast(Any, load_watched)
    status = ProcessStatus()
    worker = asyncio.create_task(process.run_generator(config, name="pool", status=status))
    orders = asyncio.create_task(_obey(talk, watched))
    loaded = asyncio.create_task(asyncio.to_thread(status.loaded.wait))
    await asyncio.wait({worker, loaded}, return_when=asyncio.FIRST_COMPLETED)
    status.loaded.set()
    gc.freeze()  # as `process_view.shown` does
    done, _ = await asyncio.wait({worker, orders}, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()
    await worker
    await watched[0].engine.close()


async def _obey(talk: Talk, watched: list[Watched]) -> None:
    numbers = itertools.count()
    while (order := await asyncio.to_thread(talk.hears)) is not None:
        (engine,) = watched
        engine.long_tail = order["do"] == "long_tail"
        engine.tokens = COMPARED if order["do"] == "shorten" else engine.load.mean
        if order["do"] == "bare":
            talk.tell(asdict(await _alone(engine, order["seconds"], numbers)))
        elif order["do"] != "shorten":
            await asyncio.sleep(WARM_S)
            talk.tell(asdict(await engine.measure(order["seconds"])))


async def _alone(watched: Watched, seconds: float, numbers: itertools.count[int]) -> Measured:
    """Requests without end, all of one length, each group replaced at once."""
    await watched.hold_back()
    at_once = SampleLimit(watched.load.slots, watched.load.group).groups_wanted(0)
    asking = [asyncio.create_task(_endless(watched, numbers)) for _ in range(at_once)]
    await asyncio.sleep(WARM_S)
    measured = await watched.measure(seconds)
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    watched.go_on()
    return measured


async def _endless(watched: Watched, numbers: itertools.count[int]) -> None:
    for number in numbers:
        # As different from each other as those of tasks: an engine may remember prompts.
        load = watched.load
        prompt = np.array([1 + int(digit) for digit in str(task_at(number, load).prompt)], np.int64)
        sampling = Sampling(max_tokens=load.mean)
        await watched.engine.sample(SampleRequest(f"alone/{number}", prompt, sampling, number, load.group))


if __name__ == "__main__":
    asyncio.run(main())
