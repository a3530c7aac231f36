"""python -m bench.peers.bare_loop FOLDER MODEL: GRPO as a plain loop, generation and training in turns on all threads.

    64 prompts x 4 ─▸ decode on one static cache ─▸ rewards ─▸ advantages ─▸ one padded forward and backward ─▸ AdamW

Everything is on-policy, so that no correction is needed. It has what makes it fast here and nothing else: all prompts
are of one length, all rows decode together, and a row that has ended stays in the batch until all have.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, StaticCache

from bench.peers import goal
from bench.peers.goal import GROUPS, NEW_TOKENS, SAMPLES, Race

END = "$"


class BareLoop:
    """One model that generates and learns.

    Axes: R rows · P tokens of a prompt · T new tokens · V vocabulary
    """

    def __init__(self, race: Race) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(race.model)
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(race.model, dtype=torch.float32)
        (self.end_id,) = self.tokenizer.encode(END, add_special_tokens=False)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=goal.RATE, weight_decay=0.0, fused=True
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, _rate)

    def prompts(self, rows: Sequence[dict[str, str]], each: int) -> Tensor:
        """[R, P], `each` rows of every prompt one after another."""
        ids = self.tokenizer([row["prompt"] for row in rows], add_special_tokens=False)["input_ids"]
        return torch.tensor(ids).repeat_interleave(each, dim=0)

    @torch.inference_mode()
    def generate(self, prompt_RP: Tensor, greedy: bool = False, most: int = NEW_TOKENS) -> Tensor:
        """At most `most` new tokens, [R, T], the end token from the end on."""
        rows, length = prompt_RP.shape
        cache = StaticCache(config=self.model.config, max_cache_len=length + most)
        new_RT = torch.full((rows, most), self.end_id)
        ended_R = torch.zeros(rows, dtype=torch.bool)
        tokens, places = prompt_RP, torch.arange(length)
        for column in range(most):
            out = self.model(tokens, past_key_values=cache, cache_position=places, logits_to_keep=1)
            logits_RV = out.logits[:, -1]
            drawn_R = logits_RV.argmax(-1) if greedy else torch.multinomial(logits_RV.softmax(-1), 1)[:, 0]
            new_RT[~ended_R, column] = drawn_R[~ended_R]
            ended_R |= drawn_R == self.end_id
            if ended_R.all():
                break
            tokens, places = new_RT[:, column : column + 1], torch.tensor([length + column])
        return new_RT

    def rewards(self, new_RT: Tensor, rows: Sequence[dict[str, str]], each: int) -> Tensor:
        """[R]"""
        texts = self.tokenizer.batch_decode(new_RT)
        answers = itertools.chain.from_iterable(itertools.repeat(row["answer"], each) for row in rows)
        scored = [
            goal.right(text.partition(END)[0], answer, END in text)
            for text, answer in zip(texts, answers, strict=True)
        ]
        return torch.tensor(scored)

    def accuracy(self, rows: Sequence[dict[str, str]]) -> float:
        """Greedy."""
        new_RT = self.generate(self.prompts(rows, 1), greedy=True)
        return float(self.rewards(new_RT, rows, 1).mean())

    def step(self, rows: Sequence[dict[str, str]]) -> None:
        """One step of GRPO."""
        prompt_RP = self.prompts(rows, SAMPLES)
        new_RT = self.generate(prompt_RP)
        self.learn(prompt_RP, new_RT, self.rewards(new_RT, rows, SAMPLES))

    def learn(self, prompt_RP: Tensor, new_RT: Tensor, reward_R: Tensor) -> None:
        """Group means are subtracted, the spread is a constant; the mean is over all new tokens."""
        reward_GS = reward_R.view(-1, SAMPLES)
        advantage_R = ((reward_GS - reward_GS.mean(1, keepdim=True)) * goal.SCALE).flatten()
        made_RT = (new_RT == self.end_id).cumsum(1) - (new_RT == self.end_id).long() == 0
        learned_R = advantage_R != 0  # others have no gradient
        if not learned_R.any():
            return
        tokens = torch.cat([prompt_RP, new_RT], 1)[learned_R]
        width = prompt_RP.shape[1] + int(made_RT.sum(1).max())
        logits = self.model(tokens[:, :width]).logits[:, prompt_RP.shape[1] - 1 : -1]
        chosen = new_RT[learned_R][:, : logits.shape[1]]
        logp = logits.log_softmax(-1).gather(-1, chosen[..., None])[..., 0]
        mask = made_RT[learned_R][:, : logits.shape[1]]
        loss = -(advantage_R[learned_R][:, None] * logp * mask).sum() / made_RT.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.schedule.step()


def _rate(step: int) -> float:
    """The share of the learning rate in a step, from 0."""
    return min((step + 1) / goal.WARM_UP, max(0.0, 1 - step / goal.STEPS))


def main() -> None:
    race = Race.from_words()
    loop, held_out = BareLoop(race), race.rows("heldout")
    tasks: Any = itertools.cycle(race.rows("train"))
    accuracy, step_s = 0.0, list[float]()
    for step in range(goal.STEPS):
        if step % goal.LOOK_EVERY == 0:
            accuracy = loop.accuracy(held_out)
            if race.is_over(accuracy):
                break
        begun = time.perf_counter()
        loop.step(list(itertools.islice(tasks, GROUPS)))
        step_s.append(time.perf_counter() - begun)
    race.end(accuracy, step_s)


if __name__ == "__main__":
    main()
