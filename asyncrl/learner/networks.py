"""The learner's networks: language models, which say log-probs, and critics, which say values.

    name                        network          weights from             trained by
    policy                      LanguageModel    model.path               learner.optimizer
    critic, cost_critic         Critic           critic.path (its body)   critic.optimizer
    reference                   LanguageModel    reference.path           nobody: frozen
    reward_model                LanguageModel    reward_model.path        reward_model.optimizer
    teacher                     LanguageModel    teacher.path             nobody: frozen

Where a path is not set, that of the policy is taken; the teacher must have its own.

What a network says of token t it reads off the hidden state at t-1, which has seen the tokens before t and no more.

Axes:  N packed tokens · T of them under the loss mask · D hidden size · V vocabulary
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from asyncrl.config.rules import require
from asyncrl.config.schema import Config, OptimizerConfig
from asyncrl.errors import ConfigError, TrainingError
from asyncrl.learner.attention import PACKED, Documents
from asyncrl.learner.backend import POLICY
from asyncrl.learner.batch import MicroBatch
from asyncrl.learner.logprobs import token_logprobs
from asyncrl.models import load_causal_lm, load_config, load_tokenizer


class LanguageModel(nn.Module):
    """A causal language model that answers with log-probs. They are computed inside `forward`, because only
    there is the sharded head whole."""

    def __init__(self, causal_lm: PreTrainedModel) -> None:
        super().__init__()
        self.causal_lm = causal_lm

    def forward(self, batch: MicroBatch, documents: Documents, following: bool = False) -> tuple[Tensor, ...]:
        """(logp_N, entropy_N), 0 outside the loss mask. following: (logp_RV,), of what may come after each rollout."""
        weight_VD = self.causal_lm.get_output_embeddings().weight
        if following:
            hidden_ND = _hidden(self.causal_lm.base_model, batch, documents)
            ends_R = torch.tensor(batch.lengths_R, device=hidden_ND.device).cumsum(0) - 1
            logits_RV = (hidden_ND[ends_R] @ weight_VD.t()).float()
            return ((logits_RV / batch.temperature_R[:, None]).log_softmax(-1),)
        at_T, hidden_TD = _seen_before(self.causal_lm.base_model, batch, documents)
        logp_T, entropy_T = token_logprobs(
            hidden_TD, weight_VD, batch.token_ids_N[at_T], batch.temperature_R[batch.seq_N[at_T]]
        )
        return _spread(logp_T, at_T, batch.tokens), _spread(entropy_T, at_T, batch.tokens)


class Critic(nn.Module):
    """The body of a language model under a linear value head, which starts at 0 and works in float32 at least."""

    def __init__(self, causal_lm: PreTrainedModel) -> None:
        super().__init__()
        self.body = causal_lm.base_model
        self.weight_D = nn.Parameter(torch.zeros(causal_lm.config.hidden_size, dtype=causal_lm.dtype))
        self.bias_1 = nn.Parameter(torch.zeros(1, dtype=causal_lm.dtype))

    def forward(self, batch: MicroBatch, documents: Documents) -> tuple[Tensor, ...]:
        """(values_N,), of the state before each token; 0 outside the loss mask."""
        at_T, hidden_TD = _seen_before(self.body, batch, documents)
        full = torch.promote_types(hidden_TD.dtype, torch.float32)
        values_T = hidden_TD.to(full) @ self.weight_D.to(full) + self.bias_1.to(full)
        return (_spread(values_T, at_T, batch.tokens),)


class Blueprint(NamedTuple):
    """How a network is made. key: of `path` in the configuration · optimizer: none for a frozen network."""

    key: str
    path: str
    make: type[LanguageModel] | type[Critic]
    optimizer: OptimizerConfig | None


def blueprint(name: str, config: Config) -> Blueprint:
    """Of POLICY or of one of `backend.MODELS`. Raises ConfigError for a teacher without a path."""
    base, critic, prm = config.model.path, config.critic, config.reward_model
    match name:
        case "policy":
            return Blueprint("model.path", base, LanguageModel, config.learner.optimizer)
        case "critic" | "cost_critic":
            return Blueprint("critic.path", critic.path or base, Critic, critic.optimizer)
        case "reference":
            return Blueprint("reference.path", config.reference.path or base, LanguageModel, None)
        case "reward_model":
            return Blueprint("reward_model.path", prm.path or base, LanguageModel, prm.optimizer)
        case "teacher":
            path = config.teacher.path
            if path is None:
                raise ConfigError(
                    "teacher.path",
                    path,
                    "must be set where there is a teacher",
                    "name its folder or hub name",
                )
            return Blueprint("teacher.path", path, LanguageModel, None)
    raise ValueError(f"no model is called {name!r}")


def load_network(name: str, config: Config) -> LanguageModel | Critic:
    """On the CPU, in `model.dtype`; without weights on disk, random ones that are the same for every name.

    Raises ConfigError as `load_causal_lm` does.
    """
    plan = blueprint(name, config)
    model = dataclasses.replace(config.model, path=plan.path)
    return plan.make(load_causal_lm(model, config.run.seed, attention=PACKED, key=plan.key))


def check_vocabularies(names: Iterable[str], config: Config) -> None:
    """Raise ConfigError for a network whose token ids cannot be the policy's.

    Tokenizers decide, since models of one family are padded to different sizes; where a folder has none, sizes do.
    """
    policy = Vocabulary.of(blueprint(POLICY, config), config)
    for name in names:
        plan = blueprint(name, config)
        if plan.path == config.model.path:
            continue
        other = Vocabulary.of(plan, config)
        if policy.tokens is None or other.tokens is None:
            same, difference = (
                other.size == policy.size,
                f"{other.size} tokens, the policy one of {policy.size}",
            )
        elif other.tokens != policy.tokens:
            same, difference = False, "other tokens than the policy's"
        else:
            most = max(policy.tokens.values())
            same, difference = other.size > most, f"{other.size} tokens, its tokenizer ids up to {most}"
        require(
            same,
            plan.key,
            plan.path,
            f"has a vocabulary of {difference}",
            "use a model with the policy's tokenizer",
        )


class Vocabulary(NamedTuple):
    """size: rows of the token table, some of which may be padding · tokens: ids by token, where there is a tokenizer"""

    size: int
    tokens: dict[str, int] | None

    @staticmethod
    def of(plan: Blueprint, config: Config) -> Vocabulary:
        model = dataclasses.replace(config.model, path=plan.path)
        size = load_config(model, key=plan.key).get_text_config().vocab_size
        try:
            return Vocabulary(size, load_tokenizer(model).get_vocab())
        except ConfigError:
            return Vocabulary(size, None)


def _seen_before(body: nn.Module, batch: MicroBatch, documents: Documents) -> tuple[Tensor, Tensor]:
    """(at_T: the tokens under the loss mask, hidden_TD: the state before each of them).

    Raises TrainingError for a token beyond the body's table: a policy with a larger one can sample its padding.
    """
    config = cast(PreTrainedModel, body).config
    largest, rows = int(batch.token_ids_N.max()), config.get_text_config().vocab_size
    if largest >= rows:
        raise TrainingError(
            f"token {largest} is beyond the {rows} of {config.name_or_path or type(body).__name__}, which stands "
            "beside a policy with a larger vocabulary; use a model with as large a one"
        )
    at_T = torch.nonzero(batch.loss_mask_N)[:, 0]
    return at_T, _hidden(body, batch, documents).index_select(0, at_T - 1)


def _hidden(body: nn.Module, batch: MicroBatch, documents: Documents) -> Tensor:
    """[N, D], the state after each token."""
    output = body(
        input_ids=batch.token_ids_N[None],
        position_ids=batch.position_ids_N[None],
        documents=documents,
        use_cache=False,
    )
    return cast(Tensor, output.last_hidden_state[0])


def _spread(values_T: Tensor, at_T: Tensor, tokens: int) -> Tensor:
    """Values of the tokens at `at_T` → of all tokens, 0 elsewhere."""
    return values_T.new_zeros(tokens).index_copy(0, at_T, values_T)
