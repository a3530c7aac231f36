"""The inputs of a decoder where tokens stand for images or videos, alike in the embedded engine and in the learner.

    ids      5  9  9  9  9  6  7  5  9 …        two texts; 9 stands for an image
    media   -1  0  0  0  0 -1 -1 -1  0 …        which item; both texts show the same
    input    e  f0 f1 f2 f3 e  e  e  f0 …       e: from the token table · f: features of the item

The vision tower runs once for each item of a pass. Token ids do not matter where an item stands, and a policy that
samples such an id gets what the token table has. Rotary positions are those of transformers, text by text.

Axes:  N packed tokens · T of them that stand for items · F features of all items · P texts · D hidden size
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from asyncrl.device.copies import on_device
from asyncrl.types import Array, MediaItem, Prompt

KIND_IDS = {"image": 1, "video": 2}
"""transformers' mm_token_type_ids; 0: text."""

ARRAYS = {"image": ("pixel_values", "image_grid_thw"), "video": ("pixel_values_videos", "video_grid_thw")}
"""The arrays of an item of the Qwen-VL families: its patches, and how many there are in time, height and width."""


@dataclass(frozen=True, slots=True)
class MediaInputs:
    """The inputs of one pass besides its tokens, on the CPU.

    items        those that are shown, each once, images before videos
    at_T         the tokens that stand for them, in order
    row_T        the feature of each of these
    position_3N  rotary positions
    next_P       those of the tokens that follow each text
    """

    items: tuple[MediaItem, ...]
    at_T: Tensor
    row_T: Tensor
    position_3N: Tensor
    next_P: Array


def media_inputs(causal_lm: PreTrainedModel, texts: Sequence[Prompt]) -> MediaInputs:
    """texts: packed one after another; some show media."""
    found = dict.fromkeys(shown.item for text in texts for shown in text.media)
    items = tuple(sorted(found, key=lambda item: KIND_IDS[item.kind]))
    tokens = [item.tokens for item in items]
    first_row = dict(zip(items, np.cumsum([0, *tokens[:-1]]).tolist(), strict=True))
    starts_P = np.cumsum([0, *(len(text.ids) for text in texts)]).tolist()
    at, row = [], []
    for start, text in zip(starts_P, texts, strict=False):
        for shown in text.media:
            at.append(torch.arange(shown.item.tokens) + start + shown.start)
            row.append(torch.arange(shown.item.tokens) + first_row[shown.item])
    position_3N = torch.cat([_rotary_positions(causal_lm.base_model, text) for text in texts], 1)
    next_P = [int(one.max()) + 1 for one in position_3N.split([len(text.ids) for text in texts], 1)]
    return MediaInputs(items, torch.cat(at), torch.cat(row), position_3N, np.array(next_P))


def _rotary_positions(base: Any, text: Prompt) -> Tensor:
    """[3, L] of one text: as transformers has them up to the last item, then one by one."""
    length = len(text.ids)
    if not text.media:
        return torch.arange(length).expand(3, -1)
    until = max(shown.start + shown.item.tokens for shown in text.media)
    types_1L = torch.zeros(1, until, dtype=torch.int32)
    for shown in text.media:
        types_1L[0, shown.start : shown.start + shown.item.tokens] = KIND_IDS[shown.item.kind]
    grids = _joined([shown.item for shown in text.media], base.get_rope_index)
    ids_1L = torch.as_tensor(text.ids[:until], dtype=torch.int64)[None]
    position_3L = base.get_rope_index(ids_1L, mm_token_type_ids=types_1L, **grids)[0][:, 0]
    following = torch.arange(length - until) + int(position_3L.max()) + 1
    return torch.cat([position_3L, following.expand(3, -1)], 1)


def decoder_inputs(
    causal_lm: PreTrainedModel, ids_1n: Tensor, items: Sequence[MediaItem], at_t: Tensor, row_t: Tensor
) -> dict[str, Any]:
    """The arguments of the decoder in place of input_ids, with the gradient of a tower that is trained.

    at_t, row_t: of `MediaInputs`, for the tokens of this rank, on the device
    """
    base: Any = causal_lm.base_model
    pooled_F: list[Tensor] = []
    deeper: list[list[Tensor]] = []
    for kind, of_kind in groupby(items, key=lambda item: item.kind):
        run = getattr(base, f"get_{kind}_features")
        arrays = _joined(list(of_kind), run)
        out = run(
            **{name: on_device(array, ids_1n.device) for name, array in arrays.items()}, return_dict=True
        )
        pooled_F += out.pooler_output
        deeper.append([torch.cat(list(layer)) for layer in getattr(out, "deepstack_features", ())])
    embeds_1nD = causal_lm.get_input_embeddings()(ids_1n)
    shown_tD = torch.cat(pooled_F)[row_t].to(embeds_1nD.dtype)
    inputs: dict[str, Any] = {"inputs_embeds": embeds_1nD.index_copy(1, at_t, shown_tD[None])}
    if deeper[0]:
        inputs["visual_pos_masks"] = torch.zeros_like(ids_1n, dtype=torch.bool).index_fill(1, at_t, True)
        inputs["deepstack_visual_embeds"] = [torch.cat(layer)[row_t] for layer in zip(*deeper, strict=True)]
    return inputs


def item_fault(config: PretrainedConfig | None, item: MediaItem) -> str | None:
    """Why a model of this configuration cannot read the item; None: it can."""
    vision = getattr(config, "vision_config", None)
    if vision is None:
        return "the model has no vision tower"
    pixels, grid = (item.arrays.get(name, np.empty(0)) for name in ARRAYS[item.kind])
    merge = vision.spatial_merge_size
    if grid.shape != (1, 3) or grid.dtype != np.int64 or grid.min() < 1 or (grid[0, 1:] % merge).any():
        return f"its grid is {grid.tolist()}"
    patches = math.prod(grid[0].tolist())
    width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    if pixels.shape != (patches, width) or pixels.dtype != np.float32 or not np.isfinite(pixels).all():
        return f"{pixels.dtype} of shape {pixels.shape}, where {patches} finite patches of {width} float32 are expected"
    tokens = patches // merge**2
    return None if tokens == item.tokens else f"{item.tokens} tokens stand for what has {tokens} features"


def _joined(items: Sequence[MediaItem], function: Callable[..., Any]) -> dict[str, Tensor]:
    """The arrays that the function takes, of all items that have them."""
    names = {name for item in items for name in item.arrays} & set(inspect.signature(function).parameters)
    return {
        name: torch.from_numpy(np.concatenate([item.arrays[name] for item in items if name in item.arrays]))
        for name in sorted(names)
    }
