"""The learner's networks: language models, which compute log-probs, and critics, which compute values.

    name                        network          weights from             trained by
    policy                      LanguageModel    model.path               learner.optimizer
      of `asyncrl reward-model` ScoringNetwork   model.path               learner.optimizer
    critics                     Critic           critic.path (its body)   critic.optimizer
    reference                   LanguageModel    reference.path           frozen
    reward_model                LanguageModel    reward_model.path        reward_model.optimizer, or frozen
    teacher                     LanguageModel    teacher.path             frozen
    a user's frozen model       LanguageModel    ModelRole.path           frozen

A path that is not set is the policy's; the teacher needs its own. The output for token t is computed from the hidden
state at t - 1, which depends on the tokens before t alone.

Axes:  N packed tokens · n of them on this rank · T of those under the loss mask · S rows of those between layers ·
R rollouts · D hidden size · V vocabulary
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, Final, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from asyncrl.config.rules import require
from asyncrl.config.schema import Config
from asyncrl.config.sections.learner import OptimizerConfig
from asyncrl.device.copies import on_device
from asyncrl.errors import ConfigError, TrainingError
from asyncrl.learner.algorithms.roles import POLICY, role_of
from asyncrl.learner.data.batch import MicroBatch
from asyncrl.learner.models.attention import PACKED
from asyncrl.learner.models.documents import Documents
from asyncrl.learner.models.logprobs import (
    LikelyTokens,
    VocabularyPart,
    most_likely,
    next_logprobs,
    token_logprobs,
)
from asyncrl.learner.models.recurrent import DELTA_NET, separate_documents
from asyncrl.learner.parallel.experts import check_experts
from asyncrl.learner.parallel.mesh import local_part
from asyncrl.learner.parallel.tensor_parallel import parallelize, vocabulary_part
from asyncrl.models.adapters import adapt, read_adapters, without_adapters
from asyncrl.models.loading import (
    empty_causal_lm,
    load_causal_lm,
    load_model_config,
    load_tokenizer,
    text_body,
    towers,
)
from asyncrl.models.routing import RouterShape, replay_experts
from asyncrl.models.vision import MediaInputs, decoder_inputs

HEAD_SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier")
"""Configuration keys of factors that some families apply to their logits: Cohere, Granite, Falcon-H1."""

WRAPPER: Final = "causal_lm."
"""The prefix that `LanguageModel` adds to the names of its parameters."""


class LanguageModel(nn.Module):
    """A causal language model that returns log-probs. They are computed in `forward`, where FSDP has gathered the head.

    vocabulary_part: this rank's rows of the head, if it is cut · token_multiple: tokens are padded to a multiple of it
    · wide_head: whether the head's products are float32, by `model.head_dtype` · replays: whether tokens go to the
    experts that engines recorded, by `model.router_replay` · likely: further tokens, see `outputs`
    """

    def __init__(self, causal_lm: PreTrainedModel) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        for tower in towers(causal_lm):
            tower.requires_grad_(False)
        self._softcap = head_softcap(causal_lm)
        self.vocabulary_part: VocabularyPart | None = None
        self.token_multiple, self.wide_head, self.replays = 1, False, False
        self.likely: LikelyTokens | None = None

    @property
    def outputs(self) -> int:
        """The number of outputs of `forward`."""
        return 2 if self.likely is None else 1 if self.likely.chosen else 3

    @property
    def width(self) -> tuple[int, ...]:
        """The shape of the first output at one token."""
        return self.likely.width if self.likely else ()

    @property
    def body(self) -> PreTrainedModel:
        return text_body(self.causal_lm)

    def forward(
        self,
        batch: MicroBatch,
        documents: Documents,
        following: bool = False,
        before_SD: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """(logp_N, entropy_N), 0 outside the loss mask, see also `token_outputs`; or, if `following`, (logp_RV,) of all
        tokens that may follow each rollout. before_SD: see `stream`."""
        weight_VD = local_part(self.causal_lm.get_output_embeddings().weight)
        if following:
            here_r, place_r = documents.ends
            hidden_rD = stream(self, batch, documents, before_SD)[place_r]
            temperature_r = batch.temperature_R[here_r]
            logp_rV = next_logprobs(
                hidden_rD, weight_VD, temperature_r, self.vocabulary_part, self._softcap, self.wide_head
            )
            return (documents.whole(spread(logp_rV, here_r, batch.rollouts)),)
        at_T, hidden_TD = _seen_before(self, batch, documents, before_SD)
        outputs = token_outputs(
            hidden_TD,
            weight_VD,
            batch,
            at_T,
            self.likely,
            part=self.vocabulary_part,
            softcap=self._softcap,
            wide=self.wide_head,
        )
        return tuple(documents.whole(spread(values_T, at_T, batch.tokens)) for values_T in outputs)


class ScoringNetwork(LanguageModel):
    """A sequence classifier with one logit, in place of a head for tokens: the score of a text, at its end.

    The head is trained beside adapters, too, and computes in float32 at least.
    """

    outputs = 1

    def __init__(self, classifier: PreTrainedModel) -> None:
        super().__init__(classifier)
        config = classifier.config
        head = getattr(classifier, "score", None)
        require(
            isinstance(head, nn.Linear) and head.bias is None,
            "model.path",
            config.name_or_path or config.model_type,
            f"{type(classifier).__name__} has no linear head called 'score'",
            "use a decoder such as Qwen, Llama, Mistral, Gemma or GPT-2",
        )
        config.architectures = [type(classifier).__name__]
        self.weight_1D.requires_grad_(True)

    @property
    def weight_1D(self) -> Tensor:
        return cast(nn.Linear, self.causal_lm.score).weight

    def forward(
        self,
        batch: MicroBatch,
        documents: Documents,
        following: bool = False,
        before_SD: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """(scores_N,): the score of the text before each token, 0 outside the loss mask."""
        at_T, hidden_TD = _seen_before(self, batch, documents, before_SD)
        full = torch.promote_types(hidden_TD.dtype, torch.float32)
        scores_T = hidden_TD.to(full) @ local_part(self.weight_1D).to(full)[0]
        return (documents.whole(spread(scores_T, at_T, batch.tokens)),)


def token_outputs(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    batch: MicroBatch,
    at_T: Tensor,
    likely: LikelyTokens | None = None,
    **head: Any,
) -> tuple[Tensor, ...]:
    """A language model's outputs at the tokens `at_T` of a batch, from the states before them: those of
    `token_logprobs`, or one of `most_likely` where `likely` is chosen here. head: further arguments of these."""
    target_T, temperature_T = batch.token_ids_N[at_T], batch.temperature_R[batch.seq_N[at_T]]
    if likely is None:
        return token_logprobs(hidden_TD, weight_VD, target_T, temperature_T, **head)
    if likely.chosen:
        return (most_likely(hidden_TD, weight_VD, target_T, temperature_T, likely, **head),)
    if "likeliest" in batch.columns:
        likely_TK = batch.columns["likeliest"][at_T].long()
    else:  # a pass whose log-probs of them nobody reads
        likely_TK = torch.arange(likely.count, device=at_T.device).expand(len(at_T), -1)
    return token_logprobs(hidden_TD, weight_VD, target_T, temperature_T, likely_TK=likely_TK, **head)


def likely_tokens(name: str, config: Config) -> LikelyTokens | None:
    """Those of a model, by `algorithm.teacher_loss`. Raises ConfigError for more tokens than it has."""
    count = config.algorithm.teacher_loss.likeliest
    if not count or name not in (POLICY, "teacher"):
        return None
    # The policy is not compared with the teacher here: where that is on a pool, this machine may lack its folder.
    sizes = [vocabulary_size(blueprint(each, config), config) for each in {POLICY, name}]
    rule = f"is more than the {min(sizes)} tokens of the models"
    require(count <= min(sizes), "algorithm.teacher_loss.top_k", count, rule, f"set {min(sizes)}, or less")
    return LikelyTokens(count, among=0 if name == POLICY else min(sizes))


def head_softcap(causal_lm: PreTrainedModel) -> float | None:
    """The model's limit of its logits, if it has one. Raises ConfigError for a head that does anything else to
    hidden · weightᵀ."""
    config = causal_lm.config.get_text_config()
    scales = {key: getattr(config, key, None) for key in HEAD_SCALES}
    done = [f"{key}={scale}" for key, scale in scales.items() if scale not in (None, 1)]
    if getattr(causal_lm.get_output_embeddings(), "bias", None) is not None:
        done.append("a bias")
    rule = f"its head has {', '.join(done)}, which the learner's log-probs do not support"
    remedy = "use a family of docs/models.md"
    require(not done, "model.path", config.name_or_path or config.model_type, rule, remedy)
    return getattr(config, "final_logit_softcapping", None)


class Critic(nn.Module):
    """The body of a language model with a linear value head, which starts at 0 and computes in float32 at least."""

    outputs: Final = 1
    width: Final[tuple[int, ...]] = ()

    def __init__(self, causal_lm: PreTrainedModel) -> None:
        super().__init__()
        self.body = text_body(causal_lm)
        self.body_name = next(name for name, part in causal_lm.named_modules() if part is self.body)
        self.token_multiple = 1
        self.weight_D = nn.Parameter(torch.zeros(self.body.config.hidden_size, dtype=causal_lm.dtype))
        self.bias_1 = nn.Parameter(torch.zeros(1, dtype=causal_lm.dtype))

    def forward(
        self, batch: MicroBatch, documents: Documents, before_SD: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """(values_N,): the value of the state before each token, 0 outside the loss mask. before_SD: see `stream`."""
        at_T, hidden_TD = _seen_before(self, batch, documents, before_SD)
        full = torch.promote_types(hidden_TD.dtype, torch.float32)
        values_T = hidden_TD.to(full) @ self.weight_D.to(full) + self.bias_1.to(full)
        return (documents.whole(spread(values_T, at_T, batch.tokens)),)


class Blueprint(NamedTuple):
    """The path of a network with its configuration key, its class, and its optimizer (None: frozen)."""

    key: str
    path: str
    make: type[LanguageModel] | type[Critic]
    optimizer: OptimizerConfig | None


def blueprint(name: str, config: Config) -> Blueprint:
    """The blueprint of POLICY or one of `roles.ROLES`. Raises ConfigError for a teacher without a path."""
    base, critic, prm = config.model.path, config.critic, config.reward_model
    match name:
        case "policy":
            made = ScoringNetwork if config.model.scores else LanguageModel
            return Blueprint("model.path", base, made, config.learner.optimizer)
        case "reference":
            return Blueprint("reference.path", config.reference.path or base, LanguageModel, None)
        case "reward_model":
            optimizer = None if prm.frozen else prm.optimizer
            return Blueprint("reward_model.path", prm.path or base, LanguageModel, optimizer)
        case "teacher":
            path = config.teacher.path
            if path is None:
                rule = "must be set where there is a teacher"
                raise ConfigError("teacher.path", path, rule, "name its folder or hub name")
            return Blueprint("teacher.path", path, LanguageModel, None)
    role = role_of(name, config.algorithm)
    if role.kind == "critic":
        return Blueprint("critic.path", critic.path or base, Critic, critic.optimizer)
    return Blueprint(f"frozen({name!r}).path", role.path or base, LanguageModel, None)


def load_network(name: str, config: Config, empty: bool = False) -> LanguageModel | Critic:
    """Load a network on the CPU, in `model.dtype`. Without weights on disk they are random, equal for every name.

    empty: leave the parameters that a checkpoint has on the meta device, for `checkpoint_source.py`. Adapters and value
    heads are made anyway. Raises ConfigError as `load_causal_lm`, and if the policy lacks experts that are to be spread
    or maps to be adapted.
    """
    plan = blueprint(name, config)
    model = dataclasses.replace(config.model, path=plan.path)
    if empty:
        causal_lm = empty_causal_lm(model, PACKED, plan.key)
    else:
        causal_lm = load_causal_lm(model, config.run.seed, PACKED, plan.key)
    separate_documents(causal_lm)
    if name == POLICY:
        check_experts(causal_lm, config)
    if name == POLICY and model.lora.rank:
        adapt(causal_lm, model.lora, config.run.seed)
        if model.lora.path is not None:
            read_adapters(causal_lm, model.lora)
    network = plan.make(causal_lm)
    if isinstance(network, LanguageModel):
        network.wide_head, network.likely = model.wide_head, likely_tokens(name, config)
        network.replays = name == POLICY and model.router_replay
        if network.replays:
            replay_experts(cast(nn.ModuleList, network.body.layers), router_shape(config))
    if name == POLICY and model.vision == "train":
        beside = towers(causal_lm)
        remedy = "set model.vision=frozen, or use Qwen2.5-VL or Qwen3-VL"
        require(bool(beside), "model.vision", "train", f"{plan.path} has no vision tower", remedy)
        for tower in beside:
            tower.requires_grad_(True)
    return network


def router_shape(config: Config) -> RouterShape:
    """The policy's. Raises ConfigError for a model without experts."""
    shape = RouterShape.of(load_model_config(config.model))
    if shape is None:
        rule = f"{config.model.path} has no experts"
        raise ConfigError("model.router_replay", True, rule, "leave it out, or use a model with experts")
    return shape


def counts_prompts_once(name: str, config: Config) -> bool:
    """Whether micro-batches of a network are bounded by computed tokens. Gated delta nets compute each prompt each
    time, and so take memory for it."""
    if not config.learner.shares:
        return False
    plan = blueprint(name, config)
    try:
        text = load_model_config(
            dataclasses.replace(config.model, path=plan.path), key=plan.key
        ).get_text_config()
    except ConfigError:  # a model that only its backend can load
        return False
    return DELTA_NET not in (getattr(text, "layer_types", None) or ())


def vocabulary_size(plan: Blueprint, config: Config) -> int:
    """The rows of a model's token table, with padding."""
    model = dataclasses.replace(config.model, path=plan.path)
    return int(load_model_config(model, key=plan.key).get_text_config().vocab_size)


def check_vocabularies(names: Iterable[str], config: Config) -> None:
    """Raises ConfigError for a network whose token ids differ from the policy's.

    Tokenizers are compared, because models of one family are padded to different sizes; without tokenizers, sizes are.
    """
    policy = Vocabulary.of(blueprint(POLICY, config), config)
    for name in names:
        plan = blueprint(name, config)
        if plan.path == config.model.path:
            continue
        other = Vocabulary.of(plan, config)
        if policy.tokens is None or other.tokens is None:
            same = other.size == policy.size
            difference = f"{other.size} tokens, the policy one of {policy.size}"
        elif other.tokens != policy.tokens:
            same, difference = False, "other tokens than the policy's"
        else:
            most = max(policy.tokens.values())
            same, difference = other.size > most, f"{other.size} tokens, its tokenizer ids up to {most}"
        rule = f"has a vocabulary of {difference}"
        require(same, plan.key, plan.path, rule, "use a model with the policy's tokenizer")


class Vocabulary(NamedTuple):
    """size: rows of the token table, with padding · tokens: ids by token; None without a tokenizer"""

    size: int
    tokens: dict[str, int] | None

    @staticmethod
    def of(plan: Blueprint, config: Config) -> Vocabulary:
        model = dataclasses.replace(config.model, path=plan.path)
        size = vocabulary_size(plan, config)
        try:
            return Vocabulary(size, load_tokenizer(model).get_vocab())
        except ConfigError:
            return Vocabulary(size, None)


def named_parameters(network: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters, tied ones once. A language model's have the names of the transformers model."""
    return {name.removeprefix(WRAPPER): parameter for name, parameter in network.named_parameters()}


def named_constants(network: nn.Module) -> dict[str, Tensor]:
    """The buffers that a checkpoint of the network has."""
    kept, named = network.state_dict().keys(), network.named_buffers()
    return {name.removeprefix(WRAPPER): buffer for name, buffer in named if name in kept}


def name_at_start(network: LanguageModel | Critic, name: str) -> str:
    """The name of a network's parameter or constant in the language model that the network was made of."""
    if isinstance(network, Critic):
        return network.body_name + name.removeprefix("body")
    return without_adapters(name)


def spread_over_tensor(network: LanguageModel | Critic, mesh: DeviceMesh, sequence: bool) -> None:
    """Cut the network's matrices over a one-dimensional mesh. Raises ConfigError as `parallelize`."""
    top = network.causal_lm.get_output_embeddings() if isinstance(network, LanguageModel) else None
    head = getattr(top, "weight", None)  # None: on another pipeline stage
    parallelize(network, network.body, head, mesh, sequence)
    network.token_multiple *= mesh.size() if sequence else 1
    if isinstance(network, LanguageModel) and head is not None:
        total = head.shape[0]
        mine = vocabulary_part(total, mesh)
        network.vocabulary_part = VocabularyPart(
            mesh.get_group(), mine.start, -(-total // mesh.size()), total
        )


def _seen_before(
    network: LanguageModel | Critic, batch: MicroBatch, documents: Documents, before_SD: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(at_T, hidden_TD): the tokens under the loss mask whose state before them is on this rank, and these states."""
    at_T, before_T = documents.scored
    return at_T, stream(network, batch, documents, before_SD).index_select(0, before_T)


def check_tokens(batch: MicroBatch, rows: int, name: str) -> None:
    """Raises TrainingError for a token beyond the model's table: a policy with a larger one can sample its padding.
    To be called before the batch goes to a GPU, for which this process would wait."""
    largest = int(batch.token_ids_N.max())
    if largest >= rows:
        raise TrainingError(
            f"token {largest} is beyond the {rows} of {name}, which stands beside a policy with a larger "
            "vocabulary; use a model with as large a one"
        )


def stream(
    network: LanguageModel | Critic,
    batch: MicroBatch,
    documents: Documents,
    before_SD: Tensor | None = None,
) -> Tensor:
    """[n, D]: the state after each token of this rank, padding included. before_SD: the output of the pipeline stage
    before; None on the first.

    With sequence parallelism, the input and output of pipeline stages are the S rows of this rank; the last layer
    gathers all n.
    """
    position_1n = documents.mine(batch.position_ids_N)[None]
    if before_SD is not None:
        inputs: dict[str, Any] = {"inputs_embeds": before_SD[None]}
    elif documents.media is not None:
        inputs, position_1n = _media_inputs(network, batch, documents, documents.media)
    else:
        inputs = {"input_ids": documents.mine(batch.token_ids_N)[None]}
    if "experts" in batch.columns and isinstance(network, LanguageModel) and network.replays:
        inputs["experts"] = documents.mine(batch.columns["experts"])
    output = network.body(**inputs, position_ids=position_1n, documents=documents, use_cache=False)
    return cast(Tensor, output.last_hidden_state[0]) + _idle_towers(network, documents)


def _media_inputs(
    network: LanguageModel | Critic, batch: MicroBatch, documents: Documents, media: MediaInputs
) -> tuple[dict[str, Any], Tensor]:
    """The inputs of the body where tokens stand for images, and rotary positions [3, 1, n]."""
    if not isinstance(network, LanguageModel):
        raise TypeError("a critic has no vision tower")
    ids_1n = documents.mine(batch.token_ids_N)[None]
    row_t, at_t = documents.here(media.row_T, documents.place(media.at_T))
    position_3n = torch.stack([documents.mine(position_N) for position_N in media.position_3N])
    inputs = decoder_inputs(network.causal_lm, ids_1n, media.items, at_t, row_t)
    return inputs, on_device(position_3n[:, None], ids_1n.device)


def _idle_towers(network: LanguageModel | Critic, documents: Documents) -> Tensor | float:
    """0, with a gradient of 0 for the parameters of a tower that is trained and that nothing passes through here: other
    ranks reduce theirs."""
    if documents.media is not None or not isinstance(network, LanguageModel):
        return 0.0
    trained = [p for tower in towers(network.causal_lm) for p in tower.parameters() if p.requires_grad]
    return 0.0 * torch.stack([p.sum() for p in trained]).sum() if trained and torch.is_grad_enabled() else 0.0


def spread(values_T: Tensor, at_T: Tensor, count: int) -> Tensor:
    """Spread values of the tokens (or rollouts) `at_T` over all `count` of them, 0 elsewhere."""
    return values_T.new_zeros(count, *values_T.shape[1:]).index_copy(0, at_T, values_T)
