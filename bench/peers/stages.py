"""python -m bench.peers.stages: each stage alone beside that of the plain loop, on one thread, by length of answer.

    generation   the embedded engine's batch of slots · the loop's static cache
    training     from groups to the optimizer step (`version_step.py`) · the loop's one padded forward and backward

All answers are of one length, so that padding costs nothing and all rows end together: the loop's best case but for its
cache, all of whose columns its attention reads in each step, those to come included. The model is the demo's, of random
weights. Both sides take turns in one process.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from asyncrl.config.load import load_config
from asyncrl.config.schema import Config
from asyncrl.generator.engines.engine import SampleRequest
from asyncrl.generator.engines.transformers.kv_cache import ATTENTION
from asyncrl.generator.engines.transformers.slots import SlotBatch
from asyncrl.learner.backends.fsdp.fsdp import FsdpBackend
from asyncrl.learner.training import requirements
from asyncrl.learner.training.version_step import version_step
from asyncrl.tasks.addition import write_model_folder
from asyncrl.types import Group, Sampling
from bench.bars import Bar, Measured, figures, row, verdict_table
from bench.generator.model import DEMO_SIZES
from bench.learner.model import groups_of
from bench.learner.rollouts import Sample
from bench.output import bench_parser, machine, write_results
from bench.peers.bare_loop import BareLoop
from bench.peers.goal import SAMPLES, Race
from bench.qwen2 import write_qwen2

RECIPE = "configs/recipes/demo.yaml"
PROMPT = 6

ROWS = {16: 256, 64: 256, 256: 64, 1024: 16, 2048: 8}
"""Answers in a measurement, by their length: those of a step of the demo, or as many as take some seconds."""

STAGES = ("generation", "training")
BARS = [
    Bar(f"{stage}_{length}.asyncrl", 0.9, over=f"{stage}_{length}.bare")
    for stage in STAGES
    for length in ROWS
]


@dataclass(frozen=True, slots=True)
class Case:
    """length: tokens of every answer · prompt_RP: [R, P], one for each group of SAMPLES rows"""

    length: int
    prompt_RP: torch.Tensor

    @staticmethod
    def of(length: int, rows: int) -> Case:
        prompts = torch.randint(3, DEMO_SIZES["vocab_size"] - 1, (rows // SAMPLES, PROMPT))
        return Case(length, prompts.repeat_interleave(SAMPLES, dim=0))

    @property
    def tokens(self) -> int:
        """The length of all answers together."""
        return len(self.prompt_RP) * self.length


class Bare:
    def __init__(self, folder: Path) -> None:
        self._loop = BareLoop(Race(folder, folder / "model", 0.0, 0, 0.0))
        self._loop.end_id = -1  # no answer ends before its length

    def generation(self, case: Case) -> Callable[[], int]:
        return lambda: self._loop.generate(case.prompt_RP, most=case.length).numel()

    def training(self, case: Case) -> Callable[[], object]:
        new_RT = torch.tensor([sample.answer for group in samples(case) for sample in group])
        reward_R = torch.tensor([sample.reward for group in samples(case) for sample in group])
        return lambda: self._loop.learn(case.prompt_RP, new_RT, reward_R)

    def parameters(self) -> Mapping[str, torch.Tensor]:
        return {name: value.detach() for name, value in self._loop.model.named_parameters()}


class Asyncrl:
    def __init__(self, folder: Path) -> None:
        self._config = config_of(folder)
        self._backend = FsdpBackend(self._config)
        self._step = version_step(self._backend, self._config, gated=False)
        self._engine_model = AutoModelForCausalLM.from_pretrained(
            folder / "model", attn_implementation=ATTENTION, dtype=torch.float32
        ).eval()

    def generation(self, case: Case) -> Callable[[], int]:
        sampling = Sampling(max_tokens=case.length)
        requests = [
            SampleRequest(str(ordinal), prompt, sampling, ordinal, SAMPLES)
            for ordinal, prompt in enumerate(case.prompt_RP[::SAMPLES].numpy())
        ]

        def run() -> int:
            batch = SlotBatch(
                self._engine_model,
                slots=len(case.prompt_RP),
                max_length=PROMPT + case.length,
                end_ids=(),
                version=0,
            )
            for request in requests:
                batch.add(request)
            made = 0
            while not batch.idle:
                made += sum(len(turn.output_ids) for _, turns in batch.step() for turn in turns)
            return made

        return run

    def training(self, case: Case) -> Callable[[], object]:
        made_up = groups_of(samples(case))
        now = self._step.logprobs(made_up)  # of an engine with these weights
        groups = [replace(group, logprobs=logp_N) for group, logp_N in zip(made_up, now, strict=True)]
        claims = list(claimed(groups, requirements.claim_tokens(self._config)))

        def run() -> None:
            for claim in claims:
                self._step.add(claim, 0)
            self._step.step(0)

        return run

    def parameters(self) -> Mapping[str, torch.Tensor]:
        return self._backend.policy.parameters()


def samples(case: Case) -> list[list[Sample]]:
    """By group; every second answer is right."""
    random = np.random.default_rng(case.length)
    prompts = case.prompt_RP[::SAMPLES].tolist()
    answers = random.integers(3, DEMO_SIZES["vocab_size"] - 1, (len(prompts), SAMPLES, case.length)).tolist()
    return [
        [Sample(prompt, answer, float(i % 2)) for i, answer in enumerate(group)]
        for prompt, group in zip(prompts, answers, strict=True)
    ]


def claimed(groups: list[Group], most: int) -> Iterator[list[Group]]:
    """The groups in claims of at most `most` tokens, if a single one has no more."""
    claim: list[Group] = []
    for group in groups:
        if claim and sum(each.tokens for each in [*claim, group]) > most:
            yield claim
            claim = []
        claim.append(group)
    yield claim


def config_of(folder: Path) -> Config:
    """The demo's, with room for the longest answers."""
    longest = max(ROWS)
    keys = [f"model.path={folder}/model", f"run.dir={folder}", "generator.engine=scripted"]
    keys += [f"generator.max_tokens={longest}", f"generator.max_length={longest + PROMPT}"]
    return load_config(Path(RECIPE), keys)


def write_model(folder: Path) -> None:
    """With weights, so that both sides load the same."""
    sizes = {**DEMO_SIZES, "num_key_value_heads": 2, "max_position_embeddings": 2 * max(ROWS)}
    write_model_folder(folder)
    write_qwen2(folder, **sizes, tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)


def repetition(sides: Mapping[str, Bare | Asyncrl], lengths: Iterable[int], number: int) -> Measured:
    """Tokens of answers per second of each side, one after the other, every other time in reverse order."""
    found: dict[str, float] = {}
    for length in lengths:
        case = Case.of(length, ROWS[length])
        for stage in STAGES:
            for name, side in sorted(sides.items(), reverse=bool(number % 2)):
                run = getattr(side, stage)(case)
                begun = time.perf_counter()
                run()
                found[f"{stage}_{length}.{name}"] = case.tokens / (time.perf_counter() - begun)
    return found


def table(found: Measured, rounds: int, lengths: Iterable[int]) -> str:
    lines = [
        "# Each stage beside that of a plain loop",
        "",
        f"`python -m bench.peers.stages`, medians of {rounds} rounds, one thread. {machine()}",
        "",
        f"The demo's model with random weights; prompts of {PROMPT} tokens, {SAMPLES} answers of one length to each.",
        "",
        "| stage | tokens of an answer | answers | tokens/s | of the plain loop | ratio |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for stage in STAGES:
        for length in lengths:
            ours, bare = f"{stage}_{length}.asyncrl", f"{stage}_{length}.bare"
            values = [found[ours], found[bare]]
            texts = [f"{value:,.0f}" for value in values]
            lines.append(
                row([stage, str(length), str(ROWS[length]), *texts, f"{found[f'{ours} / {bare}']:.2f}"])
            )
    return "\n".join([*lines, "", *verdict_table(found, BARS), ""])


def main() -> None:
    parser = bench_parser("peers.stages", __doc__ or "")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lengths", type=int, nargs="+", choices=ROWS, default=list(ROWS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="asyncrl-stages-") as temporary:
        folder = Path(temporary)
        write_model(folder / "model")
        sides: dict[str, Bare | Asyncrl] = {"asyncrl": Asyncrl(folder), "bare": Bare(folder)}
        repetition(sides, args.lengths[:1], 0)  # warms up
        rounds = []
        for number in range(args.rounds):
            rounds.append(repetition(sides, args.lengths, number))
            print(rounds[-1], flush=True)
    found = figures(rounds, BARS)
    print(text := table(found, args.rounds, args.lengths), flush=True)
    write_results(args.json, {"figures": found, "rounds": rounds}, args.table, text)


if __name__ == "__main__":
    main()
