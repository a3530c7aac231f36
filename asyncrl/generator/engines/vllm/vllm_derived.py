"""Tensors that vLLM derives from a model's weights when it has loaded them, and has to derive again at each flip.

experts on a CPU        packed: a flip writes to a plain copy, which vLLM packs again (`PackedExperts`)
projections in 8 bits   packed on a CPU, as experts are; transposed views elsewhere (`QuantizedProjections`)
latent attention (MLA)  decodes with two matrices of its own, made of kv_b_proj (`AbsorbedMatrices`)
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from asyncrl.errors import WeightSyncError

PLAIN_EXPERTS = ("TRITON", "BATCHED_TRITON")
"""Expert kernels that compute with the weights as they are loaded."""

MADE_OF_PROJECTIONS = ("azp_adj", "bias_fp32")
"""Parameters that vLLM's kernels for int8 on CPUs make of a layer's others."""

ABSORBED = ("W_UK_T", "W_UV")
"""The matrices of an MLA layer from queries to the latent space, and from there to values: the two parts of kv_b_proj,
in whose place they stand while it decodes."""


def check_constants(constants: Collection[str], load_format: str) -> None:
    """Raises WeightSyncError if vLLM has made up what no version will bring."""
    if constants and load_format == "dummy":
        raise WeightSyncError(
            f"{min(constants)} is not trained, and vLLM has drawn it at random: give a folder with weights"
        )


class PackedExperts:
    """Plain copies of experts' weights that vLLM keeps packed. A flip writes to them; then vLLM packs them again."""

    def __init__(self, model: nn.Module, vllm_config: Any) -> None:
        self._vllm_config = vllm_config
        self._layers: dict[str, Any] = {}
        self.plain: dict[str, Tensor] = {}
        for prefix, module in model.named_modules():
            if getattr(getattr(module, "quant_method", None), "moe_kernel", None) is not None:
                self._add(prefix, module)

    def _add(self, prefix: str, layer: Any) -> None:
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
        from vllm.platforms import current_platform

        if not current_platform.is_cpu():
            backend = getattr(layer.quant_method, "unquantized_backend", None)
            if getattr(backend, "name", None) not in PLAIN_EXPERTS:
                raise WeightSyncError(
                    f"the experts of {prefix} run on {backend}, which keeps their weights in a form of its own; "
                    "set generator.vllm.extra.moe_backend=triton"
                )
            return
        self._layers[prefix] = layer
        loaded, _ = get_layerwise_info(layer).restore_metadata
        for name in ("w13_weight", "w2_weight"):
            like = loaded[name]
            self.plain[f"{prefix}.{name}"] = torch.zeros(like.shape, dtype=like.dtype)

    def pack(self) -> None:
        """Let vLLM pack them as it did after loading."""
        from vllm.config import set_current_vllm_config

        for prefix, layer in self._layers.items():
            for name in ("w13_weight", "w2_weight"):
                plain = self.plain[f"{prefix}.{name}"]
                layer._parameters[name] = nn.Parameter(plain, requires_grad=False)
            layer.quant_method.moe_kernel = None
            with set_current_vllm_config(self._vllm_config):
                layer.quant_method.process_weights_after_loading(layer)


class QuantizedProjections:
    """Projections under generator.quantization.

    plain: by name, the matrices that a flip writes to; on a CPU vLLM then packs them again · derived: the names of what
    it computes from them
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._packed: dict[str, Any] = {}
        self.plain: dict[str, Tensor] = {}
        self.derived: set[str] = set()
        for prefix, module in model.named_modules():
            if getattr(module, "scheme", None) is not None:
                self._add(prefix, module)

    def _add(self, prefix: str, layer: Any) -> None:
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
        from vllm.platforms import current_platform

        name = f"{prefix}.weight"
        if not current_platform.is_cpu():
            self.plain[name] = layer.weight.data.t()
            return
        loaded, _ = get_layerwise_info(layer).restore_metadata
        self._packed[prefix] = layer
        self.plain[name] = torch.zeros(loaded["weight"].shape, dtype=loaded["weight"].dtype)
        self.derived |= {f"{prefix}.{one}" for one in MADE_OF_PROJECTIONS}
        if layer.weight is None:  # its handler alone has it
            layer.weight = nn.Parameter(torch.empty(0), requires_grad=False)

    def pack(self) -> None:
        """Let vLLM pack them as it did after loading."""
        from vllm.utils.torch_utils import set_default_torch_dtype

        with set_default_torch_dtype(self._dtype):  # of the results
            for prefix, layer in self._packed.items():
                layer.weight = nn.Parameter(self.plain[f"{prefix}.weight"], requires_grad=False)
                layer.scheme.process_weights_after_loading(layer)


class AbsorbedMatrices:
    """The matrices that MLA layers decode with. vLLM 0.32 makes views of kv_b_proj where this is not quantized, and
    copies elsewhere.

    names: of these parameters in the model; no checkpoint has them
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._copied: dict[str, Any] = {}
        self.names: set[str] = set()
        for prefix, module in model.named_modules():
            if hasattr(module, ABSORBED[0]) or getattr(module, "is_amx_bmm_enabled", False):
                self._add(prefix, module)

    def _add(self, prefix: str, layer: Any) -> None:
        if layer.is_amx_bmm_enabled:
            raise WeightSyncError(
                f"{prefix} runs on AMX, which keeps kv_b_proj in a form of its own; "
                "set generator.vllm.extra.attention_backend=CPU_MLA"
            )
        self.names |= {f"{prefix}.{name}" for name in ABSORBED}
        loaded = layer.kv_b_proj.weight.untyped_storage().data_ptr()
        if any(getattr(layer, name).untyped_storage().data_ptr() != loaded for name in ABSORBED):
            self._copied[prefix] = layer

    def absorb(self) -> None:
        """Make the copies again, where they lie. Raises WeightSyncError if vLLM puts one elsewhere: a captured CUDA
        graph would go on with the old one."""
        for prefix, layer in self._copied.items():
            places = [getattr(layer, name).data_ptr() for name in ABSORBED]
            layer.process_weights_after_loading(self._dtype)
            for name, place in zip(ABSORBED, places, strict=True):
                if getattr(layer, name).data_ptr() != place:
                    raise WeightSyncError(f"vLLM made {prefix}.{name} anew in another place")
