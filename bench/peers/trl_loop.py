"""python -m bench.peers.trl_loop FOLDER MODEL, with the packages of requirements-trl.txt: TRL's GRPOTrainer.

Its fastest settings found here: all rollouts of a step in one batch, a static cache, both threads.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from bench.peers import goal
from bench.peers.goal import GROUPS, NEW_TOKENS, SAMPLES, Race

END = "$"
AT_ONCE = GROUPS * SAMPLES


class Looks(TrainerCallback):
    """Looks at the greedy accuracy now and then, and ends the race."""

    def __init__(self, race: Race, tokenizer: Any) -> None:
        self._race, self._tokenizer, self._held_out = race, tokenizer, race.rows("heldout")
        self.accuracy, self.step_s = 0.0, list[float]()

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step % goal.LOOK_EVERY == 0:
            self.accuracy = self._look(model)
            control.should_training_stop = self._race.is_over(self.accuracy)
        self._begun = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.step_s.append(time.perf_counter() - self._begun)
        control.should_training_stop |= self._race.seconds > self._race.limit_s

    @torch.inference_mode()
    def _look(self, model: Any) -> float:
        prompts = [row["prompt"] for row in self._held_out]
        batch = self._tokenizer(prompts, add_special_tokens=False, return_tensors="pt")
        made = model.generate(**batch, max_new_tokens=NEW_TOKENS, do_sample=False)
        texts = self._tokenizer.batch_decode(made[:, batch["input_ids"].shape[1] :])
        scored = [
            goal.right(text.partition(END)[0], row["answer"], END in text)
            for text, row in zip(texts, self._held_out, strict=True)
        ]
        return sum(scored) / len(scored)


def reward(
    prompts: list[str], completions: list[str], completion_ids: list[list[int]], answer: list[str], **_: Any
) -> list[float]:
    """TRL leaves end tokens out of the texts: an answer that has them all did not end."""
    return [
        goal.SCALE * goal.right(text.partition(END)[0], right, END in text or len(ids) < NEW_TOKENS)
        for text, ids, right in zip(completions, completion_ids, answer, strict=True)
    ]


def main() -> None:
    race = Race.from_words()
    tokenizer = AutoTokenizer.from_pretrained(race.model)
    looks = Looks(race, tokenizer)
    settings = GRPOConfig(
        output_dir=str(race.folder / "trl"),
        seed=race.seed,
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=AT_ONCE,
        num_generations=SAMPLES,
        max_completion_length=NEW_TOKENS,
        temperature=1.0,
        cache_implementation="static",
        beta=0.0,
        epsilon=goal.CLIP_LOW,
        epsilon_high=goal.CLIP_HIGH,
        loss_type="dapo",
        scale_rewards="none",
        learning_rate=goal.RATE,
        warmup_steps=goal.WARM_UP,
        lr_scheduler_type="linear",
        max_steps=goal.STEPS,
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        gradient_checkpointing=False,
        logging_steps=1_000_000,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(race.model, dtype=torch.float32),
        reward_funcs=reward,
        args=settings,
        train_dataset=Dataset.from_list(race.rows("train")),
        processing_class=tokenizer,
        callbacks=[looks],
    )
    trainer.train()
    race.end(looks.accuracy, looks.step_s)


if __name__ == "__main__":
    main()
