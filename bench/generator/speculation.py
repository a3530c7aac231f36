"""The time of a batch with drafts and without: python -m bench.generator.speculation.

A batch has 32 groups of 4 answers, 32 at once, with a long tail of lengths. The policy goes on from each token with a
given one, with a given probability, so that it is known how many drafts are right; its forwards are those of any model
of its size. Plain and drafted batches run in turns, each drafted one after an earlier batch of the same tasks.
"""

from __future__ import annotations

import json
import math
import time
from statistics import median
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

from asyncrl.config.sections.generator import SpeculationConfig
from asyncrl.generator.engines.engine import SampleRequest
from asyncrl.generator.engines.transformers.drafts import Drafter
from asyncrl.generator.engines.transformers.kv_cache import ATTENTION
from asyncrl.generator.engines.transformers.slots import SlotBatch
from asyncrl.types import Array, Sampling
from bench.bars import figures, row
from bench.generator.model import LONG, SIZES, TINY
from bench.generator.watched import lognormal
from bench.output import bench_parser, machine, write_results

SHARES = (0.5, 0.7, 0.9, 0.97)
"""Probabilities of the token that the policy goes on with."""

TAIL = 0.05
"""Of the answers: those that end last."""

DRAFTED, RIDGE = 16, SpeculationConfig().ridge_tokens
"""`generator.speculation.tokens` and `ridge_tokens`."""

CONTEXTS = (128, 512, 2048)
"""Tokens behind which steps are measured."""

VOCABULARY, FOLLOWERS = 256, 64
"""Tokens, and those of them that one of the others leads to."""


def main() -> None:
    parser = bench_parser("generator.speculation", "Batches with drafts and without.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="a model of no size, to see that all works")
    args = parser.parse_args()
    torch.set_num_threads(1)
    sizes = TINY if args.tiny else SIZES
    plain = policy(sizes, SHARES[0])
    ridges = {context: ridge_tokens(plain, context) for context in CONTEXTS}
    print(f"ridge tokens by context: {ridges}", flush=True)
    found = {}
    for share in SHARES[-1:] if args.tiny else SHARES:
        model = policy(sizes, share)
        drafter = Drafter(DRAFTED, RIDGE)
        run(model, 0, drafter)
        rounds = [measured(model, 1 + number, drafter) for number in range(args.rounds)]
        found[str(share)] = figures(rounds, ())
        print(share, json.dumps(found[str(share)]), flush=True)
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    text = table(found, ridges, millions, args.rounds)
    print(text)
    write_results(
        args.json, {"figures": found, "ridge_tokens": ridges, "machine": machine()}, args.table, text
    )


def policy(sizes: dict[str, Any], share: float) -> PreTrainedModel:
    """Its layers compute all that layers compute, and add nothing: logits depend on the last token alone."""
    config = Qwen2Config(
        **sizes,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION).eval()
    width = config.hidden_size
    followers = torch.randint(FOLLOWERS, (VOCABULARY,))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embedding = torch.linalg.qr(torch.randn(width, VOCABULARY))[0].T * math.sqrt(width)
        model.model.embed_tokens.weight.copy_(embedding)
        logit = math.log((VOCABULARY - 1) * share / (1 - share))
        model.lm_head.weight.zero_().index_add_(0, followers, logit / width * embedding)
    return model


def ridge_tokens(model: PreTrainedModel, context: int) -> float:
    """Tokens with which a step takes twice as long as with one: by the times of steps of one and of twice as many
    rows as slots. As many as infinitely many, where the second is no slower."""
    few, many = (step_s(model, rows, context) for rows in (1, 2 * LONG.slots))
    return 1 + few * (2 * LONG.slots - 1) / (many - few) if many > few else math.inf


def step_s(model: PreTrainedModel, rows: int, context: int, steps: int = 16) -> float:
    batch = SlotBatch(model, slots=rows, max_length=context + steps, end_ids=(), version=0)
    prompt = np.arange(context - steps) % VOCABULARY
    batch.add(SampleRequest("steps", prompt, Sampling(max_tokens=2 * steps), 0, rows))
    times = []
    for _ in range(steps):
        begun = time.perf_counter()
        batch.step()
        times.append(time.perf_counter() - begun)
    return median(times[3:])


def measured(model: PreTrainedModel, epoch: int, drafter: Drafter) -> dict[str, float]:
    """One batch each way, which take turns at being first."""
    drafted, accepted = drafter.drafted, drafter.accepted
    ends: dict[str, Array] = {}
    for name in ("plain", "drafted") if epoch % 2 else ("drafted", "plain"):
        ends[name] = run(model, epoch, drafter if name == "drafted" else None)
    found = {f"batch_s_{name}": float(of[-1]) for name, of in ends.items()}
    found |= {f"tail_s_{name}": tail_s(of) for name, of in ends.items()}
    found["batch_ratio"] = found["batch_s_plain"] / found["batch_s_drafted"]
    found["tail_ratio"] = found["tail_s_plain"] / found["tail_s_drafted"]
    found["accepted"] = (drafter.accepted - accepted) / max(1, drafter.drafted - drafted)
    return found


def run(model: PreTrainedModel, epoch: int, drafter: Drafter | None) -> Array:
    """A batch of one epoch over the tasks. The seconds after which each answer had ended, in order."""
    batch = SlotBatch(
        model, slots=LONG.slots, max_length=LONG.prompt + LONG.longest, end_ids=(), version=0, drafter=drafter
    )
    for task in range(LONG.groups):
        for sample in range(LONG.group):
            ordinal = epoch * LONG.groups + task
            sampling = Sampling(max_tokens=lognormal(ordinal, sample))
            name = f"{ordinal}/{sample}"
            batch.add(SampleRequest(name, prompt_of(task), sampling, ordinal, first=sample))
    ends: list[float] = []
    begun = time.perf_counter()
    while not batch.idle:
        ended = len(batch.step())
        ends += [time.perf_counter() - begun] * ended
    return np.array(ends)


def prompt_of(task: int) -> Array:
    return np.random.default_rng(task).integers(0, VOCABULARY, LONG.prompt)


def tail_s(ends: Array) -> float:
    """Seconds that the last answers took alone."""
    return float(ends[-1] - ends[math.ceil(len(ends) * (1 - TAIL)) - 1])


def table(found: dict[str, dict[str, float]], ridges: dict[int, float], millions: float, rounds: int) -> str:
    shown = {
        "accepted": "drafts that were accepted",
        "batch_s_plain": "seconds of a batch without drafts",
        "batch_s_drafted": "with drafts",
        "batch_ratio": "ratio",
        "tail_s_plain": f"seconds of the last {TAIL:.0%} of its answers, without drafts",
        "tail_s_drafted": "with drafts",
        "tail_ratio": "ratio",
    }
    limits = [f"{1 / (1 - float(share)):.1f}" for share in found]
    return "\n".join(
        [
            "# Drafts of rollouts",
            "",
            f"`python -m bench.generator.speculation`, medians of {rounds} rounds of one run. {machine()}",
            f"A model of {millions:.0f}M parameters in float32, one thread; batches of {LONG.groups} groups of "
            f"{LONG.group} answers, {LONG.slots} at once, of lognormal lengths (σ = 1) up to {LONG.longest} tokens; "
            f"up to {DRAFTED} drafts a row, `ridge_tokens` {RIDGE}. Measured: "
            + ", ".join(f"{ridge:.0f} behind {context} tokens" for context, ridge in ridges.items())
            + ".",
            "",
            row(["probability of the policy's token", *found]),
            row(["---", *("--:" for _ in found)]),
            row(["limit: tokens of a step of one sample, 1/(1 - p)", *limits]),
            *(row([text, *(f"{each[name]:.3g}" for each in found.values())]) for name, text in shown.items()),
            "",
        ]
    )


if __name__ == "__main__":
    main()
