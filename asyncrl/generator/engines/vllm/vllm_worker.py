"""The end of the weight stream inside each worker process of vLLM, which imports this before it makes a model.

Weights must stay where `load_weights` put them, or an update in place does not reach the model's computation:

    linear layers on a CPU   kept as plain matrices: no oneDNN handlers, no prepacked copies (`_keep_weights_live`)
    what vLLM derives        packed experts, MLA's matrices: derived again at each flip (`vllm_derived.py`)
    constants                DeepSeek-V3's biases of routers, which nobody trains: as vLLM has loaded them
    anything else            refused by name (`vllm_layout.py`)

Two ways in: `WeightsExtension` for this project's engine, `AsyncRLWeightTransfer` for vLLM's own weight updates
(`POST /init_weight_transfer_engine`, `/start_weight_update`, `/update_weights`, `/finish_weight_update`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import psutil
import torch
import vllm._custom_ops
from torch import Tensor, nn
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.kernels.linear.scaled_mm import cpu as vllm_int8
from vllm.model_executor.layers import utils as vllm_linear

from asyncrl.config.schema import ModelConfig, SyncConfig
from asyncrl.config.sections.models import LoraConfig
from asyncrl.errors import AsyncRLError, WeightSyncError
from asyncrl.generator.engines.receiver import Learner, WeightReader
from asyncrl.generator.engines.vllm.vllm_adapters import adapter_weights
from asyncrl.generator.engines.vllm.vllm_derived import (
    AbsorbedMatrices,
    PackedExperts,
    QuantizedProjections,
    check_constants,
)
from asyncrl.generator.engines.vllm.vllm_layout import find_box_views, layout_of_views
from asyncrl.generator.engines.vllm.vllm_start import GENERATOR, checkpoint_constants
from asyncrl.generator.engines.vllm.vllm_weights import BROKEN, EVICTED, RankWeights, rank_in_generator
from asyncrl.models.loading import checkpoint_shapes
from asyncrl.sync.layout.layout import whole_layout
from asyncrl.sync.layout.quantized import quantized_layout
from asyncrl.sync.stream.snapshot import SnapshotEvictedError
from asyncrl.types import Version

Report = dict[str, Any]
"""A call's result as plain values: {"value": …}, or {"error": name, "detail": text} when it failed."""


def _keep_weights_live() -> None:
    vllm._custom_ops._supports_onednn = False
    vllm_linear.check_cpu_sgl_kernel = lambda *_: False
    vllm_int8.check_cpu_sgl_kernel = lambda *_: False  # AMX multiplies no activations in float32
    if os.environ.get("TORCHDYNAMO_DISABLE") == "1":  # torch may have been imported before it was set
        torch._dynamo.config.disable = True


def _end_with_generator() -> None:
    """A killed process sends no message: end within a second of the generator, and of vLLM's engine core.

    The core is this process on one rank, else its parent. A server that the user has started goes on.
    """
    pid, parent = int(os.environ.get(GENERATOR, "0")), os.getppid()
    if not pid:
        return
    core = os.getpid() if parent == pid else parent

    def watch() -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            generator = psutil.Process(pid)
            while (
                os.getppid() == parent
                and generator.is_running()
                and generator.status() != psutil.STATUS_ZOMBIE
            ):
                time.sleep(0.5)
        with contextlib.suppress(ProcessLookupError):
            os.kill(core, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, name="generator", daemon=True).start()


_keep_weights_live()
_end_with_generator()


def rank_weights(model: nn.Module, vllm_config: Any, dtype: str, reader: WeightReader) -> RankWeights:
    """The weights of this worker's model, from a learner whose policy has `dtype`.

    Raises WeightSyncError, naming the parameter, if the model cannot be updated in place.
    """
    of, policy = vllm_config.model_config, _policy(vllm_config, dtype)
    checkpoint, constants = _checkpoint(policy, reader.quantization), checkpoint_constants(policy)
    check_constants(constants, vllm_config.load_config.load_format)
    experts, matrices = PackedExperts(model, vllm_config), AbsorbedMatrices(model, of.dtype)
    projections = QuantizedProjections(model, of.dtype)
    live, derived = {**experts.plain, **projections.plain}, {*matrices.names, *projections.derived}
    with set_current_vllm_config(vllm_config):
        found = find_box_views(model, {**checkpoint, **constants}, live, derived)
    views = {name: found[name] for name in checkpoint}

    def derive() -> None:
        experts.pack()
        projections.pack()
        matrices.absorb()

    return RankWeights(views, layout_of_views(checkpoint, views), reader, derive)


def _policy(vllm_config: Any, dtype: str) -> ModelConfig:
    of = vllm_config.model_config
    return ModelConfig(of.model, dtype, of.trust_remote_code)  # type: ignore[arg-type]


def _checkpoint(model: ModelConfig, quantization: str | None) -> dict[str, Tensor]:
    """The parameters as the learner sends them, on the meta device; of tied ones the first name only."""
    shapes, _ = checkpoint_shapes(model)
    return {
        name: torch.empty(param.shape, dtype=getattr(torch, param.dtype), device="meta")
        for name, param in quantized_layout(whole_layout(shapes), quantization).items()
    }


class WeightsExtension:
    """Methods of every worker, called through `collective_rpc`."""

    model_runner: Any
    vllm_config: Any
    asyncrl_weights: RankWeights | None = None

    def asyncrl_prepare(
        self, dtype: str, reader: dict[str, Any], lora: dict[str, Any] | None = None
    ) -> Report:
        """Returns the floor of a flip in seconds. lora: a `LoraConfig`, where adapters alone travel."""
        rank = rank_in_generator(self.vllm_config.parallel_config, of_server=not os.environ.get(GENERATOR))

        def work() -> float:
            mine = _reader_of_rank(reader, rank)
            if lora is not None:
                policy = replace(_policy(self.vllm_config, dtype), lora=LoraConfig(**lora))
                self.asyncrl_weights = adapter_weights(self.model_runner, policy, mine)
            else:
                model = self.model_runner.get_model()
                self.asyncrl_weights = rank_weights(model, self.vllm_config, dtype, mine)
            return self.asyncrl_weights.floor_s

        return _report(work)

    def asyncrl_open(self, endpoints: Sequence[str], lineage: int) -> Report:
        return _report(lambda: self._prepared().open(Learner(tuple(endpoints), lineage)))

    def asyncrl_stage(self, version: Version) -> Report:
        return _report(lambda: self._prepared().stage(version))

    def asyncrl_staged(self) -> Report:
        """Its value is None while the transfer runs."""

        def work() -> dict[str, Any] | None:
            staged = self._prepared().staged()
            return None if staged is None else {"bytes": staged.bytes, "seconds": staged.seconds}

        return _report(work)

    def asyncrl_flip(self, version: Version) -> Report:
        return _report(lambda: self._prepared().flip(version))

    def asyncrl_verify(self) -> Report:
        return _report(lambda: self._prepared().verify())

    def asyncrl_verified(self) -> Report:
        """Its value is None while the ranks compare."""
        return _report(lambda: self._prepared().verified())

    def asyncrl_held(self, version: Version) -> Report:
        return _report(lambda: self._prepared().held(version))

    def asyncrl_close(self) -> Report:
        return _report(lambda: self._prepared().close())

    def asyncrl_receive(self, group: dict[str, Any], params: dict[str, Any]) -> Report:
        """Take a whole version by vLLM's own weight transfer, between two steps."""
        return _report(lambda: receive_whole(self, group, params))

    def _prepared(self) -> RankWeights:
        if self.asyncrl_weights is None:
            raise WeightSyncError("asyncrl_prepare comes first")
        return self.asyncrl_weights


def receive_whole(worker: Any, group: dict[str, Any], params: dict[str, Any]) -> None:
    """vLLM's four verbs, in a group of this transfer alone. A failure leaves weights of no version, in a worker that
    can take the next one."""
    engine = worker.weight_transfer_engine
    try:
        worker.init_weight_transfer_engine(group)
        worker.start_weight_update()
        try:
            worker.update_weights(params)
            worker.finish_weight_update()
        except BaseException:
            # Layers keep what has come of them, and would take the next version's for the rest of it.
            worker._weight_update_active = False
            with set_current_vllm_config(worker.vllm_config):
                engine.finish_weight_update()
            raise
    finally:
        engine.shutdown()


def _reader_of_rank(reader: dict[str, Any], rank: int) -> WeightReader:
    return WeightReader(**{**reader, "who": f"{reader['who']}/{rank}", "sync": SyncConfig(**reader["sync"])})


def _report(work: Callable[[], Any]) -> Report:
    """An exception would cross to the generator process without its type."""
    try:
        return {"value": work()}
    except SnapshotEvictedError as error:
        return {"error": EVICTED, "detail": str(error)}
    except (AsyncRLError, OSError, RuntimeError, ValueError) as error:
        return {"error": BROKEN, "detail": str(error) or type(error).__name__}


@dataclass
class LearnerInfo(WeightTransferInitInfo):
    """The source of weights. dtype: of the learner's policy · sync: keys of `SyncConfig` · keys: queue.keys."""

    run: str
    who: str
    endpoints: list[str]
    lineage: int
    dtype: str
    sync: dict[str, Any] = field(default_factory=dict)
    keys: str | None = None


@dataclass
class VersionInfo(WeightTransferUpdateInfo):
    version: int


class AsyncRLWeightTransfer(WeightTransferEngine):
    """The same stream behind vLLM's own verbs: update_weights stages one version, finish flips it and verifies."""

    init_info_cls = LearnerInfo
    update_info_cls = VersionInfo

    def init_transfer_engine(self, init_info: LearnerInfo) -> None:
        rank = rank_in_generator(self.parallel_config)
        reader = WeightReader(
            init_info.run, f"{init_info.who}/{rank}", SyncConfig(**init_info.sync), init_info.keys
        )
        self._weights = rank_weights(self.model, self.vllm_config, init_info.dtype, reader)
        self._weights.open(Learner(tuple(init_info.endpoints), init_info.lineage))

    def start_weight_update(self) -> None:
        """Nothing is touched before the version has arrived whole."""

    def receive_weights(self, update_info: VersionInfo) -> None:
        self._version = update_info.version
        self._weights.stage(update_info.version)
        while self._weights.staged() is None:
            time.sleep(0.002)

    def finish_weight_update(self) -> None:
        self._weights.flip(self._version)
        self._weights.verify()
        while self._weights.verified() is None:
            time.sleep(0.002)
        self._weights.held(self._version)

    def shutdown(self) -> None:
        weights = getattr(self, "_weights", None)
        if weights is not None:
            weights.close()
