"""Fills a network from safetensors after it was cut, so that each rank reads and holds its own boxes only.

    whole network on the meta device ─▸ stages, experts, matrices, FSDP cut it ─▸ `allocate` this rank's part ─▸ `fill`

`origin_of` lists the cases in which every process has to load the whole model instead.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PretrainedConfig

from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError
from asyncrl.learner.algorithms.roles import POLICY
from asyncrl.learner.backends.dtensor_layout import layout_of_dtensors
from asyncrl.learner.models.networks import blueprint
from asyncrl.models.loading import body_prefix, checkpoint_names, load_model_config, renames_oddly, tied_names
from asyncrl.sync.layout.layout import Box
from asyncrl.sync.layout.names import Names
from asyncrl.telemetry.bars import tracked

log = logging.getLogger(__name__)


SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
"""Where there are both, the first is read, as transformers does."""


class Slices:
    """The tensors of one checkpoint. Files are opened when they are needed and stay open.

    files  the file of each tensor
    key    the configuration key of `path`, for errors
    """

    def __init__(self, files: Mapping[str, Path], key: str, path: str) -> None:
        self._files, self._key, self.path = files, key, path
        self._open: dict[Path, Any] = {}

    @staticmethod
    def of(path: str, key: str) -> Slices | None:
        """The safetensors at `path`, or None if there are none. Raises ConfigError if they cannot be read."""
        single, index = _find(path, SINGLE), _find(path, INDEX)
        try:
            if single is not None:
                with safe_open(single, framework="pt") as file:
                    return Slices(dict.fromkeys(file.keys(), single), key, path)
            if index is not None:
                where = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
                return Slices({name: index.parent / file for name, file in where.items()}, key, path)
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise _unreadable(key, path, single or index, error) from error
        return None

    @property
    def names(self) -> Collection[str]:
        return self._files.keys()

    def read(self, name: str, shape: Sequence[int], box: Box) -> Tensor:
        """Read a box of the tensor, in the file's dtype; the result may be a view of the file. Raises ConfigError if
        the checkpoint lacks the tensor, has it in another shape than `shape`, or cannot be read."""
        file = self._files.get(name)
        if file is None:
            rule = f"its safetensors have no {name}, which a model of its config.json has"
            remedy = "fetch the weights again, or the config.json that they belong to"
            raise ConfigError(self._key, self.path, rule, remedy)
        try:
            whole = self._opened(file).get_slice(name)
            found = tuple(whole.get_shape())
            if found == tuple(shape):
                return whole[box.slices()] if shape else self._opened(file).get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise _unreadable(self._key, self.path, file, error) from error
        raise ConfigError(
            self._key,
            self.path,
            f"in {file.name} {name} has the shape {list(found)}, in a model of its config.json {list(shape)}",
            "fetch the weights again, or the config.json that they belong to",
        )

    def _opened(self, file: Path) -> Any:
        if file not in self._open:
            self._open[file] = safe_open(file, framework="pt")
        return self._open[file]


class CheckpointSource(NamedTuple):
    """A checkpoint, and the names that a network's parameters have in it."""

    slices: Slices
    names: Names

    @torch.no_grad()
    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill this rank's part of parameters and constants in place, and convert dtypes. tensors: by their names in
        the whole language model in memory. Raises ConfigError as `Slices.read`."""
        layout, live = layout_of_dtensors(tensors, self.names)
        for name, param in tracked([*layout.items()], f"reading {self.slices.path}"):
            found = live.get(name, [])
            views = [found] if isinstance(found, Tensor) else found
            for box, view in zip(param.boxes, views, strict=True):
                view.copy_(self.slices.read(name, param.shape, box))


def origin_of(name: str, config: Config) -> CheckpointSource | None:
    """The checkpoint that fills POLICY or one of `roles.ROLES`.

    Returns:
        None if every process has to make the whole model: for random weights, which depend on how many are drawn; for
        weights that are quantized, no safetensors, or of code that comes with the model; for names that only
        transformers can map to those in memory; for a body saved without its head; for a tied head that is saved too;
        for a network with a head that the checkpoint may lack.
    """
    plan = blueprint(name, config)
    model = dataclasses.replace(config.model, path=plan.path)
    if name == POLICY and model.scores:
        return None
    found, slices = load_model_config(model, plan.key), Slices.of(plan.path, plan.key)
    why = "it has no safetensors" if slices is None else _whole_because(found, slices)
    if slices is None or why is not None:
        log.info("%s: every process makes all of %s: %s", name, plan.path, why)
        return None
    names = checkpoint_names(found)
    if any(there.endswith(rule.here) for rule in names.fused for there in slices.names):
        names = dataclasses.replace(names, fused=())  # experts were saved fused, as in memory
    return CheckpointSource(slices, names)


def _whole_because(config: PretrainedConfig, slices: Slices) -> str | None:
    if getattr(config, "quantization_config", None) is not None:
        return "its weights are quantized"
    prefix = body_prefix(config)
    if prefix is None:
        return "its code comes with it"
    if renames_oddly(config):
        return "only transformers can map its names in the checkpoint"
    if tied := sorted(tied_names(config) & set(slices.names)):
        return f"it has {tied[0]}, which its config.json ties: transformers checks whether they are equal"
    if not any(name.startswith(f"{prefix}.") for name in slices.names):
        return f"its safetensors have nothing below {prefix!r}"
    return None


def allocate(network: nn.Module, device: torch.device) -> None:
    """Give all tensors on the meta device uninitialised memory. Tied parameters stay one."""
    places = defaultdict[nn.Parameter, list[tuple[nn.Module, str]]](list)
    for module in network.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places[parameter].append((module, name))
    # `nn.Module.to_empty` would also replace tensors that have values.
    network._apply(lambda t: torch.empty_like(t, device=device) if is_empty(t) else t)
    for (first, own), *others in places.values():
        for module, name in others:
            module._parameters[name] = first._parameters[own]


def move(network: nn.Module, device: torch.device) -> None:
    """Move all tensors that have memory to the device."""
    network._apply(lambda t: t if is_empty(t) else t.to(device))


def is_empty(tensor: Tensor) -> bool:
    """Whether the tensor is still to be allocated and filled."""
    return tensor.device.type == "meta"


def _find(path: str, name: str) -> Path | None:
    if Path(path).is_dir():
        file = Path(path) / name
        return file if file.exists() else None
    cached = try_to_load_from_cache(path, name)
    return Path(cached) if isinstance(cached, str) else None


def _unreadable(key: str, path: str, file: Path | None, error: Exception) -> ConfigError:
    name = file.name if file is not None else SINGLE
    return ConfigError(key, path, f"its {name} cannot be read ({error})", f"fetch {name} again")
