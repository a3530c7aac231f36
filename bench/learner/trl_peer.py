"""python -m bench.learner.trl_peer, with the packages of bench/peers/requirements-trl.txt: steps of TRL's GRPOTrainer
on rollouts that are there already. The clock runs from the end of generation to the end of the optimizer step."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from bench.learner.rollouts import GROUP, Sample, samples
from bench.process import CLOCKS, Talk

AT_ONCE = 16
"""Rollouts of a micro-batch, about as many padded tokens as asyncrl packs into one of its own."""


class Turns(transformers.TrainerCallback):
    """Waits for an order before each step and tells how long it took."""

    def __init__(self, talk: Talk, clock: str) -> None:
        self._talk, self._clock, self.generating_s = talk, CLOCKS[clock], 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._talk.hears() is None:
            raise SystemExit
        self.generating_s, self._begun = 0.0, self._clock()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._talk.tell({"seconds": self._clock() - self._begun - self.generating_s})


def main() -> None:
    torch.set_num_threads(1)
    talk = Talk()
    said = talk.hears()
    flat = [sample for group in samples("short", said["groups"], said["scale"]) for sample in group]
    turns = Turns(talk, said["clock"])
    torch.manual_seed(3)
    trainer = _trainer(said["folder"], flat, turns)
    talk.tell("ready")
    trainer.train()


def _trainer(folder: str, flat: list[Sample], turns: Turns) -> GRPOTrainer:
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(f"{folder}/model"),
        attn_implementation="sdpa",
        dtype=torch.float32,
    )
    clock = turns._clock
    rewards: Iterator[float] = itertools.cycle(sample.reward for sample in flat)

    def rollouts(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        """Those that there are, whatever is asked."""
        begun = clock()
        assert len(prompts) == len(flat)
        given = {
            "prompt_ids": [list(sample.prompt) for sample in flat],
            "completion_ids": [list(sample.answer) for sample in flat],
            "logprobs": None,
        }
        turns.generating_s += clock() - begun
        return given

    def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        return [next(rewards) for _ in completions]

    at_once = min(AT_ONCE, len(flat))
    settings = GRPOConfig(
        output_dir=f"{folder}/trl",
        use_cpu=True,
        bf16=False,
        fp16=False,
        per_device_train_batch_size=at_once,
        gradient_accumulation_steps=len(flat) // at_once,
        steps_per_generation=len(flat) // at_once,
        num_generations=GROUP,
        max_completion_length=2048,
        beta=0.0,
        loss_type="dapo",
        scale_rewards="group",
        num_iterations=1,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        gradient_checkpointing=False,
        logging_steps=1_000_000,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        max_steps=1_000_000,
        dataloader_pin_memory=False,
    )
    return GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=settings,
        train_dataset=Dataset.from_list([{"prompt": "0"} for _ in range(len(flat) // GROUP)]),
        processing_class=transformers.AutoTokenizer.from_pretrained(f"{folder}/model"),
        rollout_func=rollouts,
        callbacks=[turns],
    )


if __name__ == "__main__":
    main()
