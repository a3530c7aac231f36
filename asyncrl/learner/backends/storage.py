"""The learner's tensors on disk: sharded checkpoints that load at any world size, and Hugging Face folders.

Every rank writes its own parts; no rank gathers the model.
"""

from __future__ import annotations

import errno
import json
import shutil
import warnings
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.optim import Optimizer
from transformers import AutoTokenizer, PreTrainedModel
from transformers.utils import cached_file

from asyncrl.config.rules import require
from asyncrl.config.schema import Config
from asyncrl.learner.algorithms.roles import POLICY
from asyncrl.learner.backends import joint_save
from asyncrl.learner.backends.checkpoint_reader import CheckpointReader, read_metadata
from asyncrl.learner.ranks import process_group
from asyncrl.sync.layout.layout import ITEM_BYTES, Box, Layout, ParamLayout
from asyncrl.sync.tensors.shards import BoxTensors
from asyncrl.system.disk import writing

# Each rank loads by itself on purpose.
warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)

RNG, OPTIMIZER = "rng", "optimizer"
MOMENTS = ("exp_avg", "exp_avg_sq", "step")
MAX_FILE_BYTES = 4 << 30
PROCESSOR_FILES = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")
"""How images and videos become the model's inputs."""


class Boxes(Tensor):
    """This rank's boxes of one checkpoint parameter: live tensors, each with the shape of its box.

    torch.distributed.checkpoint saves and loads them in place. It needs a tensor of the whole shape with the three
    methods of these names; this one has no memory and supports no computation. Boxes that several ranks hold are
    written once.
    """

    _pieces: dict[tuple[int, ...], tuple[Box, Tensor]]

    @staticmethod
    def __new__(cls, shape: Sequence[int], pieces: Sequence[tuple[Box, Tensor]]) -> Boxes:
        first = pieces[0][1]
        whole = Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=first.dtype, device=first.device)
        whole._pieces = {box.offsets: (box, tensor) for box, tensor in pieces}
        return whole

    @classmethod
    def __torch_dispatch__(cls, function: Any, *_: Any, **__: Any) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"{function}: boxes can only be saved and loaded")

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(next(iter(self._pieces.values()))[1])
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for offsets, chunk in zip(self._pieces, self.__create_chunk_list__(), strict=True)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        boxes = (box for box, _ in self._pieces.values())
        return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.shape)) for box in boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        if index.offset is None:
            raise ValueError(f"{index.fqn}: one of several boxes is requested without its offset")
        return self._pieces[tuple(index.offset)][1]


class ModelState(NamedTuple):
    """The live tensors of one model that a checkpoint keeps, by name, and its optimizer (None for a frozen model)."""

    masters: Mapping[str, Tensor]
    optimizer: Optimizer | None


def save_state(folder: Path, state: Mapping[str, Any], group: ProcessGroup | None = None) -> None:
    """Collective: write a flat state (`state_of`, `staged`) as a torch.distributed.checkpoint folder. Raises OSError if
    the disk does not take it. group: joins all ranks; threads that write while training goes on need one of their own.
    """
    with writing(folder):
        joint_save.save_jointly(state, dcp.FileSystemWriter(folder), group)


def staged(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A copy of this rank's shards in host memory."""
    return {name: _copied(tensor) for name, tensor in state.items()}


def _copied(tensor: Tensor) -> Tensor:
    """A copy in host memory."""
    if isinstance(tensor, Boxes):
        return Boxes(tensor.size(), [(box, _copied(piece)) for box, piece in tensor._pieces.values()])
    return tensor.clone() if tensor.is_cpu else tensor.cpu()


def load(folder: Path, models: Mapping[str, ModelState]) -> None:
    """Collective: fill masters and optimizers in place, and set the random state. Raises ConfigError as
    `load_state`."""
    state = state_of(models)
    load_state(folder, state)
    torch.set_rng_state(state[RNG])


def load_state(folder: Path, state: dict[str, Any]) -> None:
    """Collective: fill the tensors of a flat state in place. Any world size may have saved it. Other models of the
    folder are not read. Raises ConfigError if it lacks one of the state's models, or as `read_metadata`."""
    require_models(folder, _models(state))
    failure: BaseException | None = None
    try:
        # Each rank plans alone what it reads: torch would exchange pickles for that.
        dcp.load(state, storage_reader=CheckpointReader(folder), no_dist=True)
    except (Exception, CheckpointException) as error:  # torch's is no Exception
        failure = error
    if any(process_group.exchange(failure is not None)):
        raise failure or OSError(errno.EIO, "another rank could not read its part", str(folder))


def require_models(folder: Path, names: Set[str]) -> None:
    """Raises ConfigError if the folder lacks one of these models."""
    missing = sorted(names - models_in(folder))
    rule = f"the checkpoint has no {', '.join(missing)}: it was made with another algorithm"
    remedy = "go on with that algorithm, or start anew under another run.name"
    require(not missing, "run.resume", str(folder), rule, remedy)


def load_weights(folder: Path, model: str, masters: Mapping[str, Tensor]) -> None:
    """Collective: fill the masters of one model in place, without its optimizer. Raises ConfigError if the folder lacks
    one of its tensors."""
    state = {f"{model}.{name}": master.detach() for name, master in masters.items()}
    missing = sorted(state.keys() - _names_in(folder))
    require(
        not missing,
        "the checkpoint",
        str(folder),
        f"has no {missing[0] if missing else ''}: it was made with another model.lora, or its experts by megatron",
        "give the configuration that it was made with; experts of a Megatron run are in its final/ alone",
    )
    load_state(folder, state)


def models_in(folder: Path) -> set[str]:
    """The names of the models in a checkpoint."""
    return _models(_names_in(folder))


def _models(names: Iterable[str]) -> set[str]:
    return {name.split(".")[0] for name in names} - {RNG, OPTIMIZER}


def _names_in(folder: Path) -> Set[str]:
    return read_metadata(folder).state_dict_metadata.keys()


def whole_bytes(layout: Layout) -> dict[str, int]:
    """The bytes of every whole parameter."""
    return {name: Box.whole(p.shape).elements * ITEM_BYTES[p.dtype] for name, p in layout.items()}


def as_one_box(param: ParamLayout, tensors: BoxTensors) -> Boxes:
    """A parameter's boxes as the single one that the writer of safetensors needs. They lie one below the other."""
    parts: Sequence[Tensor] = [tensors] if isinstance(tensors, Tensor) else tensors
    first = param.boxes[0]
    rows = sum(box.shape[0] for box in param.boxes) if first.shape else 0
    box = Box(first.offsets, (rows, *first.shape[1:])) if first.shape else first
    return Boxes(param.shape, [(box, torch.cat(list(parts)) if len(parts) > 1 else parts[0])])


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
    with writing(folder):
        joint_save.save_jointly(mine, writer)


def write_hf_configs(folder: Path, causal_lm: PreTrainedModel, config: Config) -> None:
    """Complete a folder of weights: config.json, generation config, index, files of processors, tokenizer files and
    `tasks.chat_template`."""
    model_path, template = config.model.path, config.tasks.chat_template
    shutil.rmtree(folder / "sharded", ignore_errors=True)
    if hasattr(causal_lm.config, "quantization_config"):  # of the checkpoint that the run began from
        del causal_lm.config.quantization_config
    causal_lm.config.save_pretrained(folder)
    if causal_lm.can_generate() and causal_lm.generation_config is not None:
        causal_lm.generation_config.save_pretrained(folder)
    _write_index(folder)
    for name in PROCESSOR_FILES:
        with suppress(OSError):  # the model has none
            shutil.copyfile(str(cached_file(model_path, name, local_files_only=True)), folder / name)
    # Without tokenizer files transformers would return an empty tokenizer.
    if not Path(model_path).is_dir() or any(Path(model_path).glob("tokenizer*")):
        tokenizer = AutoTokenizer.from_pretrained(model_path, local_files_only=True)
        if template is not None:
            tokenizer.chat_template = Path(template).read_text(encoding="utf-8")
        tokenizer.save_pretrained(folder)


def state_of(models: Mapping[str, ModelState]) -> dict[str, Tensor]:
    """The live tensors of a checkpoint by flat names: masters, Adam's moments (made here if no step has made them), and
    torch's random state."""
    state = {RNG: torch.get_rng_state()}
    for model, (masters, optimizer) in models.items():
        for name, master in masters.items():
            state[flat_name(model, name)] = master.detach()
            if optimizer is not None:
                moments = _moments(optimizer, master)
                state |= {flat_name(model, name, key): moments[key].detach() for key in MOMENTS}
    return state


def flat_name(model: str, parameter: str, moment: str = "") -> str:
    """The name of a master in a checkpoint, or of one of its moments.

    policy.NAME · optimizer.MOMENT.NAME · critic.NAME · optimizer.MOMENT.critic.NAME
    """
    if not moment:
        return f"{model}.{parameter}"
    return f"{OPTIMIZER}.{moment}.{parameter if model == POLICY else f'{model}.{parameter}'}"


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
