"""The messages from a learner to a pool that trains a model for it: micro-batches, and calls.

    learner rank 0   begin 0 ── batch · batch · learn 1 ── norm 2 ── step 3 ─▸ ┐
    learner rank 1   begin 0 ── batch · learn 1 ────────── norm 2 ── step 3 ─▸ ├─▸ 0, 1, 2, 3: each done once, when all
                                                                               │   ranks have made it

    begin    with the model of a checkpoint, or anew
    learn    add the gradients of the batches that came with it, those of rank 0 first
    norm, step, forget   as a `Model` has them
    save     into a checkpoint

Axes:  N tokens · R rollouts
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Any, Final

import numpy as np
import torch

from asyncrl.errors import TrainingError, WireError
from asyncrl.learner.algorithms.reductions import column
from asyncrl.learner.data.batch import MicroBatch
from asyncrl.queue.wire.columns import decode_columns, encode_columns
from asyncrl.types import Array

HELLO, BATCH = "hello", "batch"
"""Requests that are no calls: each gets a reply by itself."""

BEGIN, LEARN, NORM, STEP, FORGET, SAVE = "begin", "learn", "norm", "step", "forget", "save"

BAD_FOLDER = "folder"
"""Refusal of BEGIN and SAVE: the folder of the checkpoint cannot be used."""

ARGUMENTS: Final[Mapping[str, Mapping[str, tuple[type, ...]]]] = {
    BEGIN: {"epoch": (int,), "checkpoint": (str, NoneType)},
    LEARN: {"version": (int,)},
    NORM: {"scale": (float,)},
    STEP: {"scale": (float,), "lr": (float,)},
    FORGET: {},
    SAVE: {"folder": (str,)},
}
"""The arguments of each call, the same on all ranks."""

OF_ROLLOUTS: Final = {"lengths": "<i8", "ordinals": "<i8", "copies": "<f4", "temperature": "<f4"}
OF_TOKENS: Final = {"token_ids": "<i8", "position_ids": "<i8", "loss_mask": "|b1"}
COLUMN: Final = "<f4"


def registry_key(model: str) -> str:
    """The key of a model's pool in the run's registry, for {endpoint, incarnation}."""
    return f"pool/{model}"


def encode_batch(batch: MicroBatch, reads: Sequence[str]) -> list[bytes]:
    """The part of a batch that a learning model needs. reads: the columns of its objective. Raises TrainingError for
    one with images."""
    if batch.media:
        raise TrainingError(
            "a group has images, which no model that learns in a pool reads: set its where=colocated"
        )
    arrays: dict[str, Array] = {
        "lengths": np.array(batch.lengths_R, np.int64),
        "position_ids": batch.position_ids_N.numpy(),
        "ordinals": batch.ordinals_R.numpy(),
        "copies": batch.copies_R.numpy(),
        "temperature": batch.temperature_R.numpy(),
        "token_ids": batch.token_ids_N.numpy(),
        "loss_mask": batch.loss_mask_N.numpy(),
    }
    arrays |= {name: column(batch, name).float().numpy() for name in reads}
    return [bytes(frame) for frame in encode_columns(arrays).frames]


def decode_batch(frames: Any, reads: Sequence[str]) -> MicroBatch:
    """The inverse; the parts that `encode_batch` leaves out are empty. Raises WireError for anything else."""
    if not isinstance(frames, list) or not all(isinstance(frame, bytes) for frame in frames):
        raise WireError("a micro-batch is a list of frames")
    arrays = decode_columns(frames)
    expected = {**OF_ROLLOUTS, **OF_TOKENS, **dict.fromkeys(reads, COLUMN)}
    if {name: array.dtype.str for name, array in arrays.items()} != expected:
        raise WireError(f"a micro-batch of {sorted(arrays)}, expected is {sorted(expected)}")
    lengths, tokens = arrays["lengths"], arrays["token_ids"]
    _check(lengths, arrays, len(tokens))
    tensors = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
    batch = MicroBatch.of_tokens(
        tensors["token_ids"],
        lengths.tolist(),
        position_ids_N=tensors["position_ids"],
        loss_mask_N=tensors["loss_mask"],
        group_R=torch.unique_consecutive(tensors["ordinals"], return_inverse=True)[1],
        ordinals_R=tensors["ordinals"],
        copies_R=tensors["copies"],
        temperature_R=tensors["temperature"],
        columns={name: tensors[name] for name in reads},
    )
    if bool((batch.loss_mask_N & (batch.position_ids_N == 0)).any()):
        raise WireError("a segment's first token has a loss mask, but nothing predicts it")
    return batch


def _check(lengths: Array, arrays: Mapping[str, Array], tokens: int) -> None:
    """Raise WireError unless lengths and arrays fit. The sum of Python's numbers does not wrap."""
    flat = {name: array.shape for name, array in arrays.items() if array.ndim > 1}
    if flat:
        raise WireError(f"a micro-batch has values, one a token or rollout, and these are rows: {flat}")
    numbers = lengths.tolist()
    if not numbers or min(numbers) < 1 or sum(numbers) != tokens:
        raise WireError(f"{len(numbers)} lengths that sum up to {sum(numbers)} for {tokens} tokens")
    for name, array in arrays.items():
        count = len(numbers) if name in OF_ROLLOUTS else tokens
        if len(array) != count:
            raise WireError(f"{name!r} has {len(array)} values, the micro-batch needs {count}")
    if arrays["token_ids"].min() < 0:
        raise WireError("a token below 0")
    ids = arrays["position_ids"]
    if ids[np.cumsum(lengths) - lengths].any() or (np.diff(ids)[ids[1:] != 0] != 1).any():
        raise WireError("position ids that do not count each segment's tokens from 0")
    if not (np.isfinite(arrays["temperature"]) & (arrays["temperature"] > 0)).all():
        raise WireError("a temperature that is not above 0")


def call_arguments(kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call of this kind. Raises WireError for wrong ones."""
    if kind not in ARGUMENTS:
        raise WireError(f"no call is named {kind!r}")
    arguments = {}
    for name, needed in ARGUMENTS[kind].items():
        value = fields.get(name)
        if type(value) not in needed:
            raise WireError(f"{kind}: {name} = {value!r} is not of the right type")
        arguments[name] = value
    return arguments
