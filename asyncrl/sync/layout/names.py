"""From the names of a network in memory to those of its checkpoint, in which layouts speak.

    model.layers.3.mlp.experts.gate_up_proj  [256, 4096, 7168]
        [17, :2048]  ▸  model.layers.3.mlp.experts.17.gate_proj.weight  [2048, 7168]
        [17, 2048:]  ▸  model.layers.3.mlp.experts.17.up_proj.weight    [2048, 7168]

transformers keeps the experts of a layer in one parameter; checkpoints, vLLM and Megatron know each by itself. Nothing
is copied: a box of the one is a view of the other. No torch here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from asyncrl.sync.layout.layout import Box, Layout, ParamLayout


@dataclass(frozen=True, slots=True)
class Fused:
    """A parameter [experts, rows of all sources, columns] whose name ends in `here`: sources, which end in `sources`
    with the expert for *, stacked by rows and then over experts."""

    here: str
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Names:
    """fused: of a model family · renamed: (in memory, in the checkpoint), parts of names."""

    fused: tuple[Fused, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()

    def there(self, name: str) -> str:
        """The name in the checkpoint of what is not fused."""
        for mine, theirs in self.renamed:
            name = name.replace(mine, theirs)
        return name


@dataclass(frozen=True, slots=True)
class PartView:
    """A box of a checkpoint's parameter, and where it lies: `index` of the tensor of box number `part`."""

    name: str
    shape: tuple[int, ...]
    box: Box
    part: int
    index: tuple[int | slice, ...]


def checkpoint_layout(
    layout: Layout, names: Names
) -> tuple[dict[str, ParamLayout], dict[str, list[tuple[str, PartView]]]]:
    """(what is held, in checkpoint names; for each of those the view of each box, with its name in memory)."""
    views: dict[str, list[tuple[str, PartView]]] = {}
    renamed = {}
    for name, param in layout.items():
        shapes = {}
        for view in _views(name, param, names):
            views.setdefault(view.name, []).append((name, view))
            shapes[view.name] = view.shape
        for there, shape in shapes.items():
            boxes = tuple(view.box for _, view in views[there])
            renamed[there] = ParamLayout(shape, param.dtype, boxes)
    return renamed, views


def _views(name: str, param: ParamLayout, names: Names) -> Iterator[PartView]:
    fused = next((rule for rule in names.fused if name.endswith(rule.here) and len(param.shape) == 3), None)
    for part, box in enumerate(param.boxes):
        if fused is None:
            yield PartView(names.there(name), param.shape, box, part, ())
        else:
            prefix = name.removesuffix(fused.here)
            sources = [names.there(prefix + source) for source in fused.sources]
            yield from _unfused(param.shape, box, part, sources)


def _unfused(shape: Sequence[int], box: Box, part: int, sources: Sequence[str]) -> Iterator[PartView]:
    _, all_rows, columns = shape
    rows = all_rows // len(sources)
    (first, low, left), (experts, count, width) = box.offsets, box.shape
    for expert in range(first, first + experts):
        for number, source in enumerate(sources):
            start, stop = max(low, rows * number), min(low + count, rows * (number + 1))
            if start < stop and width:
                yield PartView(
                    source.replace("*", str(expert)),
                    (rows, columns),
                    Box((start - rows * number, left), (stop - start, width)),
                    part,
                    (expert - first, slice(start - low, stop - low)),
                )
