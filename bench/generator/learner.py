"""The other side of the bench: python -m bench.generator.learner. The queue, its tasks, and a learner that trains on
nothing: it takes a version's groups as soon as they are there, and publishes the next version.

Told to `check`, it compares the log-probs of groups with its own and then changes the weights, twice.
"""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from pathlib import Path
from statistics import median

import torch

from asyncrl.config.config_consistency import AGREED, agreed
from asyncrl.config.schema import Config
from asyncrl.learner.backends.fsdp.fsdp import FsdpBackend
from asyncrl.learner.data.batch import MicroBatch
from asyncrl.learner.startup import train_settings
from asyncrl.queue.client.client import BlockingClient, QueueClient
from asyncrl.queue.feeder import feed
from asyncrl.sync.stream.publisher import Publisher
from asyncrl.sync.tensors.shards import Shards
from asyncrl.types import Group, Version
from bench.broker import serving
from bench.generator.model import LOADS, Load, config_of, task_at
from bench.process import Talk

CHANGES = 2
"""Of the weights, one after another."""

AT_ONCE = 8
"""Rollouts of a claim that are compared."""

WAIT_S = 120.0
LAST_S = 5.0


def main() -> None:
    torch.set_num_threads(1)
    talk = Talk()
    said = talk.hears()
    folder = Path(said["folder"])
    load = LOADS[said["load"]]
    config = config_of(folder, said["engine"], load=load)
    with serving(config.queue, config.run.name, folder / "queue") as address:
        threading.Thread(target=lambda: asyncio.run(_feed(config, address, load)), daemon=True).start()
        learner = Learner(config, address)
        talk.tell(address)
        taking = threading.Thread(target=learner.run)
        taking.start()
        while (order := talk.hears()) == "check":
            talk.tell(learner.check())
        learner.ending.set()
        taking.join()
        if order is not None:
            talk.tell({"pause_ms_p50": median(learner.pauses_ms)})
            talk.hears()  # the generator hears at its next heartbeat that the run is over


class Learner:
    """ending: set to stop. pauses_ms: of the generator's last flips"""

    def __init__(self, config: Config, address: str) -> None:
        self.ending, self.version, self.pauses_ms = threading.Event(), 0, [0.0]
        self._config = config
        self._backend = FsdpBackend(config)
        self._client = BlockingClient(QueueClient(address, run=config.run.name, who="learner"))
        self._checking = threading.Event()
        self._checked = threading.Event()
        self._epoch_of: dict[Version, int] = {}
        self._epoch, self._compared = 0, False
        self._gaps: dict[str, float] = {}

    def check(self) -> dict[str, float]:
        """Largest difference of log-probs before any change of the weights, and after the changes."""
        self._checking.set()
        if not self._checked.wait(WAIT_S * 2):
            raise RuntimeError(f"no rollouts of one set of weights; so far {self._gaps}")
        return self._gaps

    def run(self) -> None:
        self._client.connect()
        opened = self._client.open("train", train_settings(self._config, 1))
        live = Shards(self._backend.layout(), self._backend.local_tensors())
        publisher = Publisher(0, 1, live, self._config.sync, opened.lineage)
        entry = {"endpoint": publisher.endpoint, "world": 1, "lineage": opened.lineage}
        self._client.post(AGREED, agreed(self._config))
        self._client.post("weights/0", entry)
        self._publish(publisher)
        while not self.ending.is_set():
            self._step(opened.learner_epoch)
            self.version += 1
            self._publish(publisher)
            told = self._client.trained("train", learner_epoch=opened.learner_epoch, step=self.version - 1)
            self.pauses_ms = told.stats.get("pool", {}).get("weights/pauses_ms") or self.pauses_ms
        self._client.finish("done")
        publisher.close(LAST_S)
        self._client.close()

    def _publish(self, publisher: Publisher) -> None:
        if self._compared and self._epoch < CHANGES:
            self._epoch, self._compared = self._epoch + 1, False
            torch.manual_seed(self._epoch)
            with torch.no_grad():
                for tensor in self._backend.local_tensors().values():
                    tensor.mul_(1 + 0.05 * torch.randn_like(tensor))
        self._epoch_of[self.version] = self._epoch
        publisher.publish(self.version)

    def _step(self, learner_epoch: int) -> None:
        index, last = 0, False
        while not last:
            claim = self._client.claim(
                "train",
                learner_epoch=learner_epoch,
                step=self.version,
                index=index,
                rank=0,
                max_tokens=self._config.learner.micro_batch_tokens,
                whole=False,
                wait_s=WAIT_S,
            )
            if claim is None:
                raise RuntimeError(f"no group for {WAIT_S} s")
            index, last = index + 1, claim.last
            if self._checking.is_set() and not self._checked.is_set():
                self._compare(claim.groups)

    def _compare(self, groups: list[Group]) -> None:
        """Rollouts that were made whole with the weights of now."""
        batch = MicroBatch.of(groups)
        now = [version for version, epoch in self._epoch_of.items() if epoch == self._epoch]
        other = batch.loss_mask_N & ~torch.isin(batch.versions_N, torch.tensor(now, dtype=torch.int32))
        mixed = torch.zeros(batch.rollouts, dtype=torch.bool)
        mixed[batch.seq_N[other]] = True
        whole = torch.nonzero(~mixed)[:, 0].tolist()[:AT_ONCE]
        if not whole:
            return
        batch = batch.select(whole)
        apart = (self._backend.policy.predict(batch) - batch.behaviour_N)[batch.loss_mask_N].abs()
        name = "before" if self._epoch == 0 else "after"
        self._gaps[name] = float(torch.tensor([self._gaps.get(name, 0.0), apart.max()]).max())  # NaN stays
        self._compared = True
        if self._epoch == CHANGES:
            self._checked.set()


async def _feed(config: Config, address: str, load: Load) -> None:
    client = QueueClient(address, run=config.run.name, who="feeder")
    await client.connect()
    await feed(client, "train", partial(task_at, load=load))
    await client.close()


if __name__ == "__main__":
    main()
