"""The section `algorithm:`: what is learned from a group. `asyncrl algorithms` explains every literal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, get_args

from asyncrl.config.rules import Amount, Count, NotNegative, Positive, Rule, Section, Share, key

GROUP_ADVANTAGES = (
    *("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline", "opo", "gpg", "gdpo", "pass_at_k", "sppo", "prime"),
    *("gigpo", "hgpo", "optimal_token_baseline", "asymre", "off_policy_baseline", "off_policy_step_baseline"),
)
"""Advantages that compare the rollouts of a task: those that need 'group' in `learner/algorithms/registry.py`."""

FLAT_WITHOUT_SPREAD = (
    *("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline", "opo", "gpg", "gdpo", "pass_at_k"),
    "prime",  # its paper filters by the outcome
)
"""Advantages that learn nothing from a task whose rollouts all have the same reward: those that `filter` goes with."""

OWN_WEIGHTS = ("decoupled_ppo", "aipo", "dppo_tv", "dppo_kl")
"""Losses that weigh a token against μ themselves."""

WITHOUT_RATIO = ("reinforce", "sppo", "gspo", "gmpo", "sapo", "dro", "none")
"""Losses in which a token's own ρ = π/π_p is no factor of its gradient."""


UNSHAPED = ("gdpo", "distill")
"""Advantages that are not made of the reward itself, but of its parts or of no reward at all."""


@dataclass(frozen=True)
class ShapingConfig(Section):
    """Terms that are added to the reward of a rollout before advantages are made of it."""

    kl_coef: NotNegative = key(
        0.0, "β: −β · KL(π_p‖reference) of each token in the reward; above 0 it needs a reference"
    )
    kl_form: Literal["k1", "k2", "k3", "abs"] = key("k1", "estimator of that KL")
    kl_target: Positive | None = key(
        None, "adaptive β that keeps the mean KL of a rollout here; none: β is fixed"
    )
    kl_horizon: Count = key(10000, "rollouts over which the adaptive β moves")
    overlong_buffer: Amount = key(
        0, "tokens before generator.max_tokens where the length penalty begins; 0: none"
    )
    overlong_penalty: NotNegative = key(1.0, "the most it takes off, at generator.max_tokens")
    resample: Literal["none", "pow", "max_min", "max_random"] = key(
        "none", "PF-PPO: which rollouts are trained on, by reward"
    )
    resample_power: Positive = key(2.0, "p of |R|^p")

    @property
    def changes_rewards(self) -> bool:
        return self.kl_coef > 0 or self.overlong_buffer > 0 or self.resample != "none"

    def rules(self, at: str) -> Iterator[Rule]:
        if self.kl_target is not None:
            yield Rule(
                self.kl_coef > 0,
                "kl_coef",
                "kl_target adapts it by factors, which cannot move it away from 0",
                "set algorithm.shaping.kl_coef=0.001 or unset algorithm.shaping.kl_target",
            )


@dataclass(frozen=True)
class KlLossConfig(Section):
    """KL to another model as a term of the loss: `kl_loss` to the reference; `teacher_loss` to the teacher, weighed
    by `correction`. Where coef > 0, that model is needed."""

    coef: NotNegative = key(0.0, "weight of the term")
    form: Literal["k1", "k2", "k3", "abs", "k1+", "k3+", "abs+"] = key(
        "k3", "'+': this value with the unbiased gradient of k2"
    )


@dataclass(frozen=True)
class TeacherLossConfig(KlLossConfig):
    form: Literal["k1", "k2", "k3", "abs", "k1+", "k3+", "abs+", "topk"] = key(  # type: ignore[assignment]
        "k3",
        "'+': this value with the unbiased gradient of k2 · topk: the forward KL(teacher‖π) over the teacher's `top_k` "
        "most likely tokens at each position, and all others as one",
    )
    top_k: Count = key(32, "of form topk: tokens at each position")

    @property
    def likeliest(self) -> int:
        """K of form topk; 0: the loss takes the sampled tokens alone."""
        return self.top_k if self.form == "topk" else 0

    def rules(self, at: str) -> Iterator[Rule]:
        yield Rule(
            self.form != "topk" or self.coef > 0,
            "form",
            f"has a teacher give its most likely tokens, which nothing looks at with {at}.coef=0",
            f"set {at}.coef=1.0, or leave it out",
        )
        yield Rule(
            self.form == "topk" or self.top_k == TeacherLossConfig.top_k,
            "top_k",
            "is of form topk alone",
            f"set {at}.form=topk",
        )


Criterion = Literal[
    "none",
    "token_k1",
    "token_k2",
    "token_k3",
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k1",
    "seq_max_k2",
    "seq_max_k3",
    "m2po",
]
CRITERIA: tuple[str, ...] = get_args(Criterion)[1:]


@dataclass(frozen=True)
class CorrectionConfig(Section):
    """Off-policy correction: what multiplies or masks the loss of a token whose μ is not the proximal policy."""

    kind: Literal["none", "tis", "icepop"] = key(
        "none", "weights π_p/μ truncated at `high` / zero outside [low, high]"
    )
    level: Literal["token", "sequence"] = key(
        "token", "of the weight: each token's own, or the product over its rollout"
    )
    low: NotNegative = key(0.5, "least weight that icepop keeps")
    high: Positive = key(2.0, "where tis truncates a weight; the most that icepop keeps")
    normalise: bool = key(False, "divide the weights by their mean over the batch (needs the whole batch)")
    reject: Criterion = key(
        "none",
        "leave out tokens (token_*) or rollouts (seq_*) too far from μ; m2po: by the batch's second moment",
    )
    reject_low: float | None = key(None, "k1: least π_p/μ that is kept; none: 1 / reject_high")
    reject_high: Positive = key(
        2.0, "k1: most π_p/μ that is kept; k2, k3: most divergence; m2po: τ (the paper: 0.04)"
    )
    also_reject: dict[str, float] = key(
        {}, "further values of reject, each with its reject_high: what any of them leaves out is left out"
    )
    reject_first: bool = key(
        False, "reject before advantages are made, so that their returns and whitening skip what is rejected"
    )

    def rules(self, at: str) -> Iterator[Rule]:
        yield Rule(
            0 <= self.low <= self.high,
            "low",
            f"is a weight that is kept, and so is high={self.high}",
            f"set {at}.low={min(1.0, self.high) / 2}",
        )
        low = 1 / self.reject_high if self.reject_low is None else self.reject_low
        yield Rule(
            not self.reject.endswith("k1") or 0 < low <= self.reject_high,
            "reject_low",
            f"and reject_high={self.reject_high} bound a ratio π_p/μ; unset, it is 1 / reject_high",
            f"set {at}.reject_low=0.5 and {at}.reject_high=2.0",
        )
        for name, high in self.also_reject.items():
            yield Rule(
                name in CRITERIA and name != self.reject != "none",
                "also_reject",
                f"has {name}, which is no criterion besides {at}.reject={self.reject}",
                f"set {at}.reject, and name others of {', '.join(CRITERIA)}",
            )
            least = 1.0 if name.endswith("k1") else 0.0
            yield Rule(
                isinstance(high, float | int) and high >= least and high != 0,
                "also_reject",
                f"has {name}={high}, where a number above {least:g} is what reject_high is",
                f"set {at}.also_reject.{name}=2.0",
            )
        yield Rule(
            not self.reject_first or self.reject != "none",
            "reject_first",
            f"has nothing to do: with {at}.reject=none nothing is left out",
            f"set {at}.reject=seq_mean_k1",
        )
        yield Rule(
            not self.normalise or self.kind != "none",
            "normalise",
            f"has nothing to do: with {at}.kind=none every weight is 1",
            f"set {at}.kind=tis",
        )


@dataclass(frozen=True)
class AlgorithmConfig(Section):
    advantage: Literal[
        "gae",
        "grpo",
        "dr_grpo",
        "rloo",
        "reinforce_pp",
        "reinforce_pp_baseline",
        "remax",
        "optimal_token_baseline",
        "asymre",
        "off_policy_baseline",
        "off_policy_step_baseline",
        "opo",
        "gpg",
        "gdpo",
        "pass_at_k",
        "vapo",
        "prime",
        "gigpo",
        "hgpo",
        "sppo",
        "safe_rlhf",
        "distill",
    ] = "grpo"
    loss: Literal[
        "ppo",
        "decoupled_ppo",
        "gspo",
        "cispo",
        "gmpo",
        "sapo",
        "dppo_tv",
        "dppo_kl",
        "clip_cov",
        "kl_cov",
        "aipo",
        "reinforce",
        "dro",
        "sppo",
        "none",
    ] = "ppo"
    own_advantage: str | None = key(
        None, "'file.py:function' or 'package.module:function' in place of advantage"
    )
    own_loss: str | None = key(None, "in place of loss, see docs/own_algorithm.md")
    aggregation: Literal[
        "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
    ] = key("token-mean", "from a loss per token to one number, always over all groups of an optimizer step")
    norm_tokens: Count | None = key(
        None, "denominator of seq-mean-token-sum-norm; none: generator.max_tokens"
    )
    advantage_scale: float = key(1.0, "multiplies every advantage")
    segment_credit: Literal["each", "split", "last"] = key(
        "each",
        "of the advantage of a rollout of several segments: each gets all of it, an equal part, or the last one all",
    )

    # of advantages
    gamma: Share = key(
        1.0, "γ: discount of rewards per token (per step in gigpo, hgpo, off_policy_step_baseline)"
    )
    lam: Share = key(1.0, "λ of gae")
    vapo_alpha: Positive = key(0.05, "α: λ_policy = 1 − 1 / (α · length)")
    pass_k: int | None = key(None, "k of pass_at_k, at least 2; none: the group's size")
    step_weight: float = key(1.0, "ω: weight of the step advantage in gigpo")
    hgpo_history: Amount = key(2, "K: states before a step's own that its groups may have to share")
    hgpo_alpha: float = key(1.0, "α: weight (k + 1)^α of the groups that share k of them")
    sppo_eta: float = key(1.0, "η of sppo: how far the log-ratio is pulled")
    sppo_beta: float | None = key(None, "R − soft-mean_β(R) in place of P̂ − ½; none: P̂ − ½")
    baseline_shift: float = key(
        -0.1, "asymre: δV, what is added to the mean reward of the group; below 0: right answers weigh more"
    )
    baseline_floor: float = key(
        0.0,
        "off_policy_baseline, off_policy_step_baseline: F, the reward assumed of what the group does not have: that of "
        "a wrong answer, or the return of a failure",
    )
    prm_beta: Positive = key(0.05, "β: the implicit process reward is β(log π_prm − log π_ref)")
    cost_part: str = key(
        "cost", "safe_rlhf: the reward part that is a cost (give it reward.weights.<part>=0)"
    )
    cost_limit: float = key(0.0, "safe_rlhf: mean cost that is allowed")
    cost_lr: NotNegative = key(0.1, "safe_rlhf: α of the multiplier's ascent")
    cost_multiplier: NotNegative = key(1.0, "safe_rlhf: λ at the start")
    cost_multiplier_max: float = key(5.0, "safe_rlhf: most that λ rises to")

    # of losses
    clip_low: Positive = key(0.2, "ε_lo")
    clip_high: Positive = key(0.28, "ε_hi; above ε_lo it is clip-higher")
    dual_clip: float | None = key(None, "c of the dual clip for negative advantages; none: off")
    proximal: Literal["behaviour", "frozen", "loglinear"] = key(
        "behaviour",
        "π_p of the ratio ρ = π/π_p: the recorded μ; the policy frozen at the version's start; or a "
        "log-linear mean of μ and π that costs no forward",
    )
    weight_cap: Positive = key(5.0, "decoupled_ppo: most that π_p/μ multiplies · aipo: ρ_max · dppo: c")
    sapo_tau: tuple[float, float] = key((1.0, 1.05), "τ for positive and negative advantages")
    dro_beta: Positive = key(0.1, "β: weight of the penalty on log² ρ")
    dppo_bound: Positive = key(0.2, "divergence of a sampled token past which it moves no further out")
    cov_share: Positive = key(
        0.0002, "clip_cov, kl_cov: share of the batch's tokens that are detached or penalised"
    )
    cov_range: tuple[float, float] = key(
        (1.0, 5.0), "clip_cov: covariances between which a token may be detached"
    )
    cov_kl_coef: NotNegative = key(1.0, "kl_cov: weight of the penalty")
    lm_coef: NotNegative = key(
        0.0, "weight of the mean −log π of rollouts whose reward before shaping is above 0.5 (VAPO: 0.1)"
    )
    truncated: Literal["refuse", "weigh"] = key(
        "refuse",
        "samples of generator.top_p, top_k or min_p: refuse, or train on them by the weight π/μ, which is "
        "exact for what could be drawn and blind to the rest",
    )
    entropy_bonus: float = key(0.0, "weight of the policy's entropy, which the loss then rewards")

    # around both
    shaping: ShapingConfig = field(default_factory=ShapingConfig)
    kl_loss: KlLossConfig = field(default_factory=KlLossConfig)
    teacher_loss: TeacherLossConfig = field(default_factory=TeacherLossConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    filter: Literal["none", "no_spread"] = key(
        "none",
        "DAPO: drop groups whose rewards are all equal, and go on asking; refused where such groups teach something: "
        "under gae, remax and others, or with KL or entropy terms",
    )

    def rules(self, at: str) -> Iterator[Rule]:
        yield Rule(
            self.built_in_advantage not in UNSHAPED or not self.shaping.changes_rewards,
            "shaping",
            f"changes a reward that advantage '{self.advantage}' does not look at",
            "unset kl_coef, overlong_buffer and resample; algorithm.kl_loss.coef keeps a policy near the reference too",
        )
        yield Rule(
            self.built_in_advantage != "distill" or self.filter == "none",
            "filter",
            "looks at rewards, and advantage 'distill' learns from a teacher whatever they are",
            "set algorithm.filter=none",
        )
        yield from self._filter_rules()
        yield from self._baseline_rules()
        yield Rule(
            self.built_in_loss != "none" or bool(self.kl_terms or self.entropy_bonus or self.lm_coef),
            "loss",
            "leaves nothing to learn: no term stands beside it",
            "set algorithm.teacher_loss.coef=1.0 for distillation, or algorithm.loss=ppo",
        )
        yield Rule(
            self.dual_clip is None or self.dual_clip > 1,
            "dual_clip",
            "bounds the loss of a negative advantage at ρ = c, which must lie above the ratio's own 1",
            "set algorithm.dual_clip=3.0",
        )
        yield Rule(
            min(self.sapo_tau) > 0,
            "sapo_tau",
            "are temperatures, and above 0",
            "set algorithm.sapo_tau=[1.0, 1.05]",
        )
        yield Rule(
            self.cost_multiplier <= self.cost_multiplier_max,
            "cost_multiplier",
            f"is where λ starts, and must not be above algorithm.cost_multiplier_max={self.cost_multiplier_max}",
            "set algorithm.cost_multiplier=1.0",
        )
        yield Rule(
            self.pass_k is None or self.pass_k >= 2,
            "pass_k",
            "the best of one is the reward itself",
            "set algorithm.pass_k=2 or more, or algorithm.advantage=rloo",
        )

    def _baseline_rules(self) -> Iterator[Rule]:
        """Off-policy baselines compare π with μ over many tokens. They refuse what leaves tokens out, or makes π and μ
        differ on fresh data."""
        other = self.built_in_advantage not in ("off_policy_baseline", "off_policy_step_baseline")
        yield Rule(
            other or not self.correction.reject_first,
            "correction.reject_first",
            f"leaves the tokens out by which advantage '{self.advantage}' sees how far the policy has moved",
            "set algorithm.correction.reject_first=false",
        )
        yield Rule(
            other or self.truncated == "refuse",
            "truncated",
            f"makes π/μ less than 1 at every token, which advantage '{self.advantage}' takes for movement",
            "set generator.top_p=1, top_k and min_p off, and algorithm.truncated=refuse",
        )

    def _filter_rules(self) -> Iterator[Rule]:
        """Refuse a filter of groups that have a gradient although their rewards are all equal."""
        if self.filter == "none":
            return
        yield Rule(
            self.built_in_advantage in (None, *FLAT_WITHOUT_SPREAD),
            "filter",
            f"drops groups whose rewards are all equal, from which advantage '{self.advantage}' learns as well",
            "set algorithm.filter=none, or an advantage that compares rewards within a group, such as grpo",
        )
        terms = {
            **{f"loss={name}": self.built_in_loss == name for name in ("sppo", "dro")},
            "kl_loss.coef": self.kl_loss.coef > 0,
            "teacher_loss.coef": self.teacher_loss.coef > 0,
            "shaping.kl_coef": self.shaping.kl_coef > 0,
            "entropy_bonus": self.entropy_bonus != 0,
            "lm_coef": self.lm_coef > 0,
        }
        found = [f"algorithm.{term}" for term, counts in terms.items() if counts]
        yield Rule(
            not found,
            "filter",
            f"drops groups whose rewards are all equal, from which {' and '.join(found)} learns as well",
            "set algorithm.filter=none, or leave that term out",
        )

    @property
    def weighs_behaviour(self) -> bool:
        """Whether π/μ, μ as recorded, is a factor of each token's gradient. An own loss decides for itself."""
        if self.own_loss or self.loss in OWN_WEIGHTS or self.correction.kind != "none":
            return True
        return self.proximal == "behaviour" and self.loss not in WITHOUT_RATIO

    @property
    def kl_terms(self) -> dict[str, KlLossConfig]:
        """KL terms of the loss that count, by the model that they draw the policy to."""
        terms = {"reference": self.kl_loss, "teacher": self.teacher_loss}
        return {model: term for model, term in terms.items() if term.coef > 0}

    @property
    def built_in_advantage(self) -> str | None:
        """`advantage`; none where `own_advantage` stands in its place."""
        return None if self.own_advantage else self.advantage

    @property
    def built_in_loss(self) -> str | None:
        """`loss`; none where `own_loss` stands in its place."""
        return None if self.own_loss else self.loss


def policy_rules(algorithm: AlgorithmConfig, steps: int) -> Iterator[Rule]:
    """Refuse a loss or correction whose policies are the same by construction: it would do nothing, or all twice.

    steps: optimizer steps of one version
    """
    yield from _correction_rules(algorithm, steps)
    loss, proximal = algorithm.built_in_loss, algorithm.proximal
    yield Rule(
        loss != "decoupled_ppo" or proximal != "behaviour",
        "algorithm.proximal",
        "makes decoupled_ppo plain ppo, since its weight π_p/μ is then 1",
        "set algorithm.proximal=loglinear, or algorithm.loss=ppo",
    )
    yield Rule(
        loss not in ("decoupled_ppo", "kl_cov") or proximal != "frozen" or steps > 1,
        "algorithm.proximal",
        f"is the policy itself while a version is one optimizer step: ρ is 1, and {loss} holds nothing back",
        "set learner.mini_batches=4, or algorithm.proximal=loglinear",
    )
    yield from _sppo_rules(algorithm)


def _correction_rules(algorithm: AlgorithmConfig, steps: int) -> Iterator[Rule]:
    loss, proximal, correction = algorithm.built_in_loss, algorithm.proximal, algorithm.correction
    for name, value in (("kind", correction.kind), ("reject", correction.reject)):
        yield Rule(
            value == "none" or proximal != "behaviour",
            f"algorithm.correction.{name}",
            "weighs the proximal policy against the behaviour, and proximal 'behaviour' makes the two the same",
            "set algorithm.proximal=frozen",
        )
    yield Rule(
        correction.kind == "none" or loss not in OWN_WEIGHTS,
        "algorithm.correction.kind",
        f"would weigh every token a second time: loss '{loss}' has a weight of its own, algorithm.weight_cap",
        "set algorithm.correction.kind=none",
    )
    yield Rule(
        not correction.normalise or proximal != "loglinear" or steps == 1,
        "algorithm.correction.normalise",
        "divides by a mean over the whole version, in which proximal 'loglinear' moves with every optimizer step",
        "set algorithm.proximal=frozen",
    )


def _sppo_rules(algorithm: AlgorithmConfig) -> Iterator[Rule]:
    loss, advantage = algorithm.built_in_loss, algorithm.built_in_advantage
    yield Rule(
        loss != "sppo" or algorithm.proximal == "frozen",
        "algorithm.proximal",
        "loss sppo measures how far the policy moves from that at the version's start",
        "set algorithm.proximal=frozen",
    )
    yield Rule(
        loss != "sppo" or algorithm.aggregation == "seq-mean-token-sum",
        "algorithm.aggregation",
        "loss sppo is one number per rollout, whose parts are summed over its tokens and averaged over rollouts",
        "set algorithm.aggregation=seq-mean-token-sum",
    )
    yield Rule(
        loss != "sppo" or advantage in ("sppo", None),
        "algorithm.advantage",
        "is not what loss sppo pulls the log-ratio to, η(P̂ − ½)",
        "set algorithm.advantage=sppo",
    )
    yield Rule(
        loss != "sppo" or algorithm.segment_credit == "each",
        "algorithm.segment_credit",
        "shares out an advantage, and loss sppo takes a target for the whole rollout",
        "set algorithm.segment_credit=each",
    )
    yield Rule(
        advantage != "sppo" or loss in ("sppo", None),
        "algorithm.loss",
        "would take the target of advantage sppo, what the log-ratio is pulled to, for an advantage",
        "set algorithm.loss=sppo",
    )
