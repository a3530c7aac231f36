"""The pipeline stages of one rank: runs of decoder layers, under the names that they have in the whole network.

    stage 0       embedding · layers 0 … 3
    stage 1                   layers 4 … 7
    stage 2                   layers 8 … 10 · norm · head        a critic: its value head

Modules of other stages are replaced by `Absent`, which returns its input. So the model's own forward runs on every
stage, and layer 4 is layer 4 on all of them.

Axes:  S rows between two stages: a micro-batch's tokens, or this rank's part of them · W rows of a message, at least S
· D hidden size
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor, nn

from asyncrl.config.rules import require
from asyncrl.config.schema import Config
from asyncrl.learner.data.batch import MicroBatch
from asyncrl.learner.models.documents import Documents
from asyncrl.learner.models.networks import (
    Critic,
    LanguageModel,
    blueprint,
    load_network,
    named_constants,
    named_parameters,
    stream,
)
from asyncrl.learner.parallel.mesh import layers_of

PARTS = ("embed_tokens", "layers", "norm")
"""The parts of a body that can be cut. Qwen, Llama, Mistral, Gemma, DeepSeek and their MoE models have them."""


class Absent(nn.Module):
    """Takes the place of a module that is on another stage."""

    def forward(self, first: Any, *_: Any, **__: Any) -> Any:
        return first


class ModelStage(nn.Module):
    """The `index`-th of `stages` parts that `cut` makes of a network. Its forward calls take batches from `expect`."""

    def __init__(self, network: LanguageModel | Critic, index: int, stages: int) -> None:
        super().__init__()
        self.network, self.index, self.stages = network, index, stages
        self.first, self.last = index == 0, index == stages - 1
        self._expected: deque[tuple[MicroBatch, Documents, bool]] = deque()
        self._width = 0

    def expect(
        self, batches: Iterable[tuple[MicroBatch, Documents]], width: int, following: bool = False
    ) -> None:
        """Set the batches of the next forward calls, on the device, and W. following: see `LanguageModel.forward`."""
        self._expected.clear()
        self._expected.extend((batch, documents, following) for batch, documents in batches)
        self._width = width

    def forward(self, state_WD: Tensor) -> Tensor | tuple[Tensor, ...]:
        """The network's outputs on the last stage; on the others [W, D], the first S rows of them real. The first stage
        ignores its input."""
        batch, documents, following = self._expected.popleft()
        before_SD = None if self.first else state_WD[: self.rows(documents)]
        if not self.last:
            after_SD = stream(self.network, batch, documents, before_SD)
            return F.pad(after_SD, (0, 0, 0, self._width - len(after_SD)))
        options = {"following": True} if following else {}  # a critic has no such option
        return self.network(batch, documents, before_SD=before_SD, **options)

    def rows(self, documents: Documents) -> int:
        """S, for these documents."""
        return sum(span.stop - span.start for span in documents.spans) // self.network.token_multiple


class ModelStages(nn.ModuleList):
    """The stages of one rank, in order.

    whole      parameters of the whole network on the meta device
    constants  likewise
    tied       the token table's name if the head is the same matrix; the first and the last stage have a copy each
    """

    def __init__(
        self,
        stages: Iterable[ModelStage],
        whole: Mapping[str, Tensor],
        constants: Mapping[str, Tensor],
        tied: str | None,
    ) -> None:
        super().__init__(stages)
        self.tied, self._whole, self._constants = tied, whole, constants

    @property
    def parts(self) -> list[ModelStage]:
        return [cast(ModelStage, stage) for stage in self]

    @property
    def network(self) -> LanguageModel | Critic:
        """The network of one stage, for its configuration."""
        return self.parts[0].network

    def named_parameters_here(self) -> dict[str, nn.Parameter]:
        """This rank's parameters by their names in the whole network; a tied head has the table's name."""
        found = {name: p for stage in self.parts for name, p in named_parameters(stage.network).items()}
        last = self.parts[-1]
        if self.tied is not None and last.last:
            head = cast(LanguageModel, last.network).causal_lm.get_output_embeddings().weight
            found = {self.tied if p is head else name: p for name, p in found.items()}
        return found

    def named_constants_here(self) -> dict[str, Tensor]:
        return {
            name: buffer for stage in self.parts for name, buffer in named_constants(stage.network).items()
        }

    def of_all_ranks(self, here: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All parameters of the whole network, in its order: this rank's from `here`, the others on the meta device. A
        tied table belongs to the first stage."""
        mine = here.keys() if self.parts[0].first else here.keys() - {self.tied}
        return {name: here[name] if name in mine else meta for name, meta in self._whole.items()}

    def constants_of_all_ranks(self) -> dict[str, Tensor]:
        """`named_constants` of the whole network: this rank's, the others on the meta device."""
        here = self.named_constants_here()
        return {name: here.get(name, meta) for name, meta in self._constants.items()}


def load_stages(name: str, config: Config, rank: int, empty: bool = False) -> ModelStages:
    """Make the stages of the `rank`-th of `learner.parallel.pipeline` ranks, each cut out of a whole network that
    `load_network` makes. Raises ConfigError as it does, and for a model that cannot be cut."""
    parallel, plan = config.learner.parallel, blueprint(name, config)
    parts: list[ModelStage] = []
    for index in stages_of(rank, parallel.pipeline, parallel.stages_per_rank):
        network = load_network(name, config, empty)
        _check_parts(network, plan.key, plan.path)
        tied = _tied(network)
        whole = {name: p.detach().to("meta") for name, p in named_parameters(network).items()}
        constants = {name: b.to("meta") for name, b in named_constants(network).items()}
        parts.append(cut_stage(network, index, parallel.stages))
    return ModelStages(parts, whole, constants, tied)


def stages_of(rank: int, ranks: int, per_rank: int) -> range:
    """The stages of a rank: stage i + 1 is on the next rank.

    >>> list(stages_of(1, ranks=4, per_rank=2))
    [1, 5]
    """
    return range(rank, ranks * per_rank, ranks)


def cut_stage(network: LanguageModel | Critic, index: int, stages: int) -> ModelStage:
    """Make the `index`-th of `stages` out of a whole network, which is changed."""
    body: Any = network.body
    mine = layers_of(index, stages, len(body.layers))
    body.layers = nn.ModuleList(layer if i in mine else Absent() for i, layer in enumerate(body.layers))
    if index > 0:
        body.embed_tokens = Absent()
    if index < stages - 1:
        body.norm = Absent()
        if isinstance(network, LanguageModel):
            network.causal_lm.set_output_embeddings(Absent())
        else:
            del network.weight_D, network.bias_1
    return ModelStage(network, index, stages)


def _check_parts(network: LanguageModel | Critic, key: str, path: str) -> None:
    body = network.body
    lacking = [part for part in PARTS if not hasattr(body, part)]
    rule = f"{type(body).__name__} cannot be cut into pipeline stages: it has no {', '.join(lacking)}"
    remedy = "use learner.parallel.pipeline=1, or a model such as Qwen, Llama, Mistral or Gemma"
    require(not lacking, key, path, rule, remedy)


def _tied(network: LanguageModel | Critic) -> str | None:
    """The name of the token table if it is also the head."""
    if not isinstance(network, LanguageModel):
        return None
    head = network.causal_lm.get_output_embeddings().weight
    table = network.causal_lm.get_input_embeddings().weight
    names = [name for name, parameter in named_parameters(network).items() if parameter is table]
    return names[0] if head is table else None
