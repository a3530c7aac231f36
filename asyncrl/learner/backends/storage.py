"""The learner's tensors on disk: sharded checkpoints that load at any world size, and Hugging Face folders.

Every rank writes its own parts; no rank gathers the model.
"""

from __future__ import annotations

import errno
import json
import shutil
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim import Optimizer
from transformers import AutoTokenizer, PreTrainedModel

from asyncrl.config.schema import Config
from asyncrl.config.sections.rules import require
from asyncrl.learner.models.roles import POLICY
from asyncrl.system.disk import writing

warnings.filterwarnings(
    "ignore", message="torch.distributed is disabled", category=UserWarning
)  # see `_alone`

RNG, OPTIMIZER = "rng", "optimizer"
MOMENTS = ("exp_avg", "exp_avg_sq", "step")
MAX_FILE_BYTES = 4 << 30


class ModelState(NamedTuple):
    """The live tensors of one model that a checkpoint keeps, by name, and its optimizer (None for a frozen model)."""

    masters: Mapping[str, Tensor]
    optimizer: Optimizer | None


def save(folder: Path, state: Mapping[str, Any], group: ProcessGroup | None = None) -> None:
    """Collective: write a flat state (`state_of`, `staged`) as a torch.distributed.checkpoint folder.

    Args:
        group: joins all ranks; threads that write while training goes on need one of their own.

    Raises:
        OSError: The disk does not take it.
    """
    with _writing(folder):
        dcp.save(dict(state), checkpoint_id=str(folder), process_group=group, no_dist=_alone())


def staged(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A copy of this rank's shards in host memory."""
    return {name: tensor.clone() if tensor.is_cpu else tensor.cpu() for name, tensor in state.items()}


def load(folder: Path, models: Mapping[str, ModelState]) -> None:
    """Collective: fill masters and optimizers in place. Other models of the folder are not read.

    Raises:
        ConfigError: The folder lacks one of these models.
    """
    require_models(folder, models)
    state = state_of(models)
    load_state(folder, state)
    torch.set_rng_state(state["rng"])


def load_state(folder: Path, state: dict[str, Any]) -> None:
    """Collective: fill the tensors of a flat state in place. Any world size may have saved it."""
    dcp.load(state, checkpoint_id=str(folder), no_dist=_alone())


def load_weights(folder: Path, model: str, masters: Mapping[str, Tensor]) -> None:
    """Collective: fill the masters of one model in place, without its optimizer.

    Raises:
        ConfigError: The folder lacks one of its tensors.
    """
    state = {f"{model}.{name}": master.detach() for name, master in masters.items()}
    missing = sorted(state.keys() - dcp.FileSystemReader(folder).read_metadata().state_dict_metadata.keys())
    require(
        not missing,
        "the checkpoint",
        str(folder),
        f"has no {missing[0] if missing else ''}: it was made with another model.lora, or its experts by megatron",
        "give the configuration that it was made with; experts of a Megatron run are in its final/ alone",
    )
    load_state(folder, dict(state))


def require_models(folder: Path, names: Collection[str]) -> None:
    """Raises ConfigError if the folder lacks one of these models."""
    missing = sorted(set(names) - models_in(folder))
    require(
        not missing,
        "run.resume",
        str(folder),
        f"the checkpoint has no {', '.join(missing)}: it was made with another algorithm",
        "go on with that algorithm, or start anew under another run.name",
    )


def models_in(folder: Path) -> set[str]:
    """The names of the models in a checkpoint."""
    keys = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    return {key.split(".")[0] for key in keys} - {RNG, OPTIMIZER}


def write_hf_weights(
    folder: Path, tensors: Mapping[str, Any], sizes: Mapping[str, int] | None = None
) -> None:
    """Collective: write safetensors of at most 4 GiB each, in checkpoint names. Shards are put together on disk.

    Args:
        tensors: all of the model; tensors that other ranks write are on the meta device.
        sizes: bytes of every parameter; needed where no rank has a part of each.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if sizes is None:
        sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
    writer = HuggingFaceStorageWriter(
        path=str(folder),
        fqn_to_index_mapping=_files(sizes),
        save_distributed=True,
        enable_consolidation=True,
    )
    mine = {name: tensor for name, tensor in tensors.items() if not tensor.is_meta}
    with _writing(folder):
        dcp.save(mine, storage_writer=writer, no_dist=_alone())


def write_hf_configs(folder: Path, causal_lm: PreTrainedModel, config: Config) -> None:
    """Complete a folder of weights: config.json, generation config, index, tokenizer files and
    `tasks.chat_template`."""
    model_path, template = config.model.path, config.tasks.chat_template
    shutil.rmtree(folder / "sharded", ignore_errors=True)
    causal_lm.config.save_pretrained(folder)
    if causal_lm.can_generate() and causal_lm.generation_config is not None:
        causal_lm.generation_config.save_pretrained(folder)
    _write_index(folder)
    # Without tokenizer files transformers would return an empty tokenizer.
    if not Path(model_path).is_dir() or any(Path(model_path).glob("tokenizer*")):
        tokenizer = AutoTokenizer.from_pretrained(model_path, local_files_only=True)
        if template is not None:
            tokenizer.chat_template = Path(template).read_text(encoding="utf-8")
        tokenizer.save_pretrained(folder)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Failures to write as OSError: torch hides them in a BaseException, and a full disk in its archive's own error."""
    try:
        with writing(folder):
            yield
    except CheckpointException as error:
        causes = [cause for cause, _ in error.failures.values()]
        known = next((cause for cause in causes if isinstance(cause, OSError)), None)
        with writing(folder):
            raise known or OSError(errno.EIO, str(causes[0])) from error


def state_of(models: Mapping[str, ModelState]) -> dict[str, Tensor]:
    """The live tensors of a checkpoint by flat names: masters, Adam's moments (made here if no step has made them), and
    torch's random state.

    rng · policy.NAME · optimizer.MOMENT.NAME · critic.NAME · optimizer.MOMENT.critic.NAME · …
    """
    state = {RNG: torch.get_rng_state()}
    for model, (masters, optimizer) in models.items():
        state |= {f"{model}.{name}": master.detach() for name, master in masters.items()}
        if optimizer is None:
            continue
        owner = "" if model == POLICY else f"{model}."
        for name, master in masters.items():
            moments = _moments(optimizer, master)
            state |= {f"{OPTIMIZER}.{key}.{owner}{name}": moments[key].detach() for key in MOMENTS}
    return state


def _moments(optimizer: Optimizer, master: Tensor) -> dict[str, Tensor]:
    moments = optimizer.state[master]
    if not moments:
        moments["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
        moments["exp_avg"] = torch.zeros_like(master)
        moments["exp_avg_sq"] = torch.zeros_like(master)
    return moments


def _files(sizes: Mapping[str, int]) -> dict[str, int]:
    """The number of each parameter's file, from 1."""
    numbers, number, filled = {}, 1, 0
    for name, size in sizes.items():
        if filled and filled + size > MAX_FILE_BYTES:
            number, filled = number + 1, 0
        numbers[name] = number
        filled += size
    return numbers


def _write_index(folder: Path) -> None:
    """Write model.safetensors.index.json, by which transformers finds files under any name."""
    where: dict[str, str] = {}
    total = 0
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            where |= dict.fromkeys(file.keys(), path.name)
        total += path.stat().st_size
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")


def _alone() -> bool:
    return not torch.distributed.is_initialized()
