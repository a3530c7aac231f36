"""The learner's tensors on disk: sharded checkpoints that load at any world size, and Hugging Face folders.

Every rank writes only what it holds; no rank gathers the model.
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
from asyncrl.disk import writing
from asyncrl.learner.models.roles import POLICY

warnings.filterwarnings(
    "ignore", message="torch.distributed is disabled", category=UserWarning
)  # see `_alone`

RNG, OPTIMIZER = "rng", "optimizer"
MOMENTS = ("exp_avg", "exp_avg_sq", "step")
MAX_FILE_BYTES = 4 << 30


class ModelState(NamedTuple):
    """What is kept of one model. masters: its tensors by name, live · optimizer: none if it is frozen."""

    masters: Mapping[str, Tensor]
    optimizer: Optimizer | None


def save(folder: Path, state: Mapping[str, Any], group: ProcessGroup | None = None) -> None:
    """∀ A torch.distributed.checkpoint folder of a flat state: a `state_of`, or a `staged` one. group: of all ranks, by
    which they meet; one of their own for those that write beside what goes on.

    Raises OSError if the disk does not take it.
    """
    with _writing(folder):
        dcp.save(dict(state), checkpoint_id=str(folder), process_group=group, no_dist=_alone())


def staged(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A copy of this rank's shards, in the memory of the CPU."""
    return {name: tensor.clone() if tensor.is_cpu else tensor.cpu() for name, tensor in state.items()}


def load(folder: Path, models: Mapping[str, ModelState]) -> None:
    """Fill masters and optimizers in place; the world size need not be the one that saved.

    Raises ConfigError for a model that the folder does not have; those that it has beyond `models` are left out.
    """
    require_models(folder, models)
    state = state_of(models)
    load_state(folder, state)
    torch.set_rng_state(state["rng"])


def load_state(folder: Path, state: dict[str, Any]) -> None:
    """∀ Fill the tensors of a flat state in place, whoever saved it."""
    dcp.load(state, checkpoint_id=str(folder), no_dist=_alone())


def load_weights(folder: Path, model: str, masters: Mapping[str, Tensor]) -> None:
    """∀ Fill the masters of one model in place, and nothing beside them. Raises ConfigError for a tensor that the
    folder does not have."""
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
    """Raise ConfigError for a model that the folder does not have."""
    missing = sorted(set(names) - models_in(folder))
    require(
        not missing,
        "run.resume",
        str(folder),
        f"the checkpoint has no {', '.join(missing)}: it was made with another algorithm",
        "go on with that algorithm, or start anew under another run.name",
    )


def models_in(folder: Path) -> set[str]:
    """Names of the models that were saved here."""
    keys = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    return {key.split(".")[0] for key in keys} - {RNG, OPTIMIZER}


def write_hf_weights(
    folder: Path, tensors: Mapping[str, Any], sizes: Mapping[str, int] | None = None
) -> None:
    """∀ Safetensors in checkpoint names, files of at most 4 GiB; sharded pieces are put together on disk.

    tensors: all of the model, those that other ranks write without memory · sizes: bytes of every parameter, where no
    rank has a part of each
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
    """config.json, generation config, tokenizer files, with `tasks.chat_template` if that is set, and the index, beside
    weights that are there already."""
    model_path, template = config.model.path, config.tasks.chat_template
    shutil.rmtree(folder / "sharded", ignore_errors=True)
    causal_lm.config.save_pretrained(folder)
    if causal_lm.can_generate() and causal_lm.generation_config is not None:
        causal_lm.generation_config.save_pretrained(folder)
    _write_index(folder)
    # For a folder without tokenizer files transformers makes an empty tokenizer up.
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
    """What is kept of these models, both Adam moments of each, and torch's random state: flat names → the live
    tensors; moments that no step has made yet are made here.

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
    """Name → number of its file, from 1."""
    numbers, number, filled = {}, 1, 0
    for name, size in sizes.items():
        if filled and filled + size > MAX_FILE_BYTES:
            number, filled = number + 1, 0
        numbers[name] = number
        filled += size
    return numbers


def _write_index(folder: Path) -> None:
    """model.safetensors.index.json, which transformers wants where there are several files; then it also
    knows the one file by the name that the writer gave it."""
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
