"""Rewards by a reward model: a sequence classifier's logit for prompt and answer."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from asyncrl.config.rules import require
from asyncrl.config.schema import ModelConfig
from asyncrl.device import accelerator
from asyncrl.models.loading import load_classifier, load_model_config, load_tokenizer
from asyncrl.types import Task


class Classifier:
    """The reward is a logit of an AutoModelForSequenceClassification, for use with `per: group`.

    It has a tokenizer and a chat template of its own. The answer follows a prompt of messages as one more message, and
    a plain prompt as text.
    """

    per = "group"

    def __init__(
        self,
        path: str,
        label: int | None = None,
        dtype: Literal["float32", "bfloat16"] = "float32",
        batch: int = 8,
        max_tokens: int | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        """
        Args:
            path: folder or cached hub name.
            label: the logit that is the reward; needed where the head has several.
            dtype: of the weights.
            batch: answers in one pass; 1 is used if the tokenizer has no padding token.
            max_tokens: limit of prompt and answer together, beyond which an answer fails; None: the model's positions.
        """
        known = ("float32", "bfloat16")
        require(dtype in known, "dtype", dtype, "is not known", f"set dtype to one of {', '.join(known)}")
        require(batch > 0, "options.batch", batch, "must be above 0", "set options.batch=1 or more")
        self._where = ModelConfig(path, dtype, trust_remote_code)
        config = load_model_config(self._where, "path")
        _check_label(label, config.num_labels or 0, path)
        self._label, self._batch = label or 0, batch
        self._most = max_tokens or getattr(config.get_text_config(), "max_position_embeddings", None)
        self._tokenizer = load_tokenizer(self._where, "path")
        self._tokenizer.padding_side = "right"
        self._device = accelerator.current_device()
        self._model: nn.Module | None = None
        self._loading = threading.Lock()

    def start(self) -> None:
        """Load the weights. Raises ConfigError if they have no head."""
        with self._loading:
            if self._model is None:
                model = load_classifier(self._where, "path")
                model.config.get_text_config().pad_token_id = self._tokenizer.pad_token_id
                self._model = cast(nn.Module, model).to(self._device)

    def __call__(self, task: Task, texts: Sequence[str]) -> list[float]:
        """Raises ValueError for an answer that is too long."""
        self.start()
        ids = [answer_ids(self._tokenizer, task.prompt, text) for text in texts]
        longest = max(map(len, ids))
        if self._most is not None and longest > self._most:
            raise ValueError(f"{longest} tokens of prompt and answer, {self._most} are the most")
        size = self._batch if self._tokenizer.pad_token_id is not None else 1
        return [score for at in range(0, len(ids), size) for score in self._scores(ids[at : at + size])]

    @torch.no_grad()
    def _scores(self, ids: list[list[int]]) -> list[float]:
        assert self._model is not None
        padded = self._tokenizer.pad({"input_ids": ids}, padding=len(ids) > 1, return_tensors="pt")
        logits = self._model(**padded.to(self._device)).logits
        return [float(score) for score in logits[:, self._label].float().cpu()]


def answer_ids(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str | list[dict[str, Any]],
    answer: str | list[dict[str, Any]],
) -> list[int]:
    """The tokens of prompt and answer, as a classifier reads them. answer: messages, behind a prompt of messages."""
    if isinstance(prompt, str):
        return list(tokenizer.encode(f"{prompt}{answer}"))
    messages = answer if isinstance(answer, list) else [{"role": "assistant", "content": answer}]
    return list(tokenizer.apply_chat_template([*prompt, *messages], tokenize=True, return_dict=False))


def _check_label(label: int | None, labels: int, path: str) -> None:
    several, remedy = f"the {labels} logits of {path}", "set label=0, or take a reward model with one"
    chosen = label is not None or labels == 1
    require(chosen, "label", label, f"must say which of {several} is the reward", remedy)
    rule = f"is none of {several}, which are counted from 0"
    require(label is None or 0 <= label < labels, "label", label, rule, "leave it out where there is one")
