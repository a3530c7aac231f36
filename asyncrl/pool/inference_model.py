"""A frozen model of a pool: the log-probs that it gives to the tokens of a group."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from asyncrl.learner.train_stream import TRAIN
from asyncrl.pool.model import PoolModel
from asyncrl.pool.worker import Doing, LeftOut
from asyncrl.types import Array, Group

NOT_FINITE = "not_finite"


class InferenceModel(PoolModel):
    """`Work` of a model that is not trained: its column is called as the model."""

    at_once = 1

    @property
    def streams(self) -> Mapping[str, Doing]:
        return {TRAIN: self.columns}

    def stats(self) -> Mapping[str, float]:
        return {}

    async def ready(self) -> None:
        """At once."""

    def check(self) -> None:
        """Nothing."""

    async def columns(self, group: Group) -> Mapping[str, Array]:
        """Raises LeftOut."""
        said_N = await self.said(group)
        if not torch.isfinite(said_N).all():
            raise LeftOut(NOT_FINITE, f"the {self.name} gives a log-prob that is no finite number")
        return {self.name: said_N.numpy()}
