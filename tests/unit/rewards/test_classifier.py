"""The reward model among the ready-made rewards, against plain transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from learner_cases import rollout
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
)

from asyncrl.config.schema import RewardConfig
from asyncrl.errors import ConfigError
from asyncrl.generator.scoring.rewards import Scorer
from asyncrl.rewards.classifier import Classifier
from asyncrl.types import Task

TASK = Task(0, "12+34=")
CHAT = Task(1, [{"role": "user", "content": "12+34="}])
TEXTS = ["46$", "1", "4,6,>46$", "46"]
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{{ ';' if m['role'] == 'user' else '|' }}{% endfor %}"


@pytest.fixture(scope="module")
def folder(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's tokenizer with a chat template, under a classifier of two labels."""
    return classifier_in(tmp_path_factory.mktemp("two"), model_folder, labels=2)


@pytest.fixture(scope="module")
def single(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return classifier_in(tmp_path_factory.mktemp("one"), model_folder, labels=1)


def classifier_in(folder: Path, model_folder: Path, labels: int) -> Path:
    torch.manual_seed(labels)
    config = Qwen2Config.from_pretrained(model_folder, num_labels=labels, max_position_embeddings=32)
    Qwen2ForSequenceClassification(config).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def plain(folder: Path, text: str) -> list[float]:
    """The logits of one text, by itself."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.tensor([tokenizer.encode(text)])).logits[0].tolist()


@pytest.mark.parametrize("batch", [1, 3])
def test_the_reward_is_the_logit_of_prompt_and_answer(single: Path, batch: int) -> None:
    found = Classifier(str(single), batch=batch)(TASK, TEXTS)
    assert found == pytest.approx([plain(single, f"12+34={text}")[0] for text in TEXTS], abs=1e-5)
    assert len({round(score, 4) for score in found}) == len(TEXTS)


def test_messages_go_through_its_own_chat_template_and_a_label_chooses_the_logit(folder: Path) -> None:
    (found,) = Classifier(str(folder), label=1)(CHAT, ["46"])
    assert found == pytest.approx(plain(folder, "12+34=;46|")[1], abs=1e-5)


@pytest.mark.parametrize(
    ("labels", "options", "key"),
    [
        (2, {}, "label"),
        (2, {"label": 2}, "label"),
        (1, {"label": -1}, "label"),
        (1, {"dtype": "int8"}, "dtype"),
        (1, {"batch": 0}, "options.batch"),
    ],
)
def test_bad_options_are_refused(labels: int, options: dict, key: str, folder: Path, single: Path) -> None:
    with pytest.raises(ConfigError) as error:
        Classifier(str(folder if labels == 2 else single), **options)
    assert error.value.key == key


def test_a_model_without_such_a_head_is_refused(model_folder: Path, tmp_path: Path) -> None:
    Qwen2ForCausalLM(Qwen2Config.from_pretrained(model_folder)).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(model_folder).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"lacks score\.weight"):
        Classifier(str(tmp_path), label=0).start()
    with pytest.raises(ConfigError) as error:
        Classifier("nowhere")
    assert error.value.key == "path"


def test_an_answer_that_is_too_long_fails(single: Path) -> None:
    with pytest.raises(ValueError, match="38 tokens of prompt and answer, 32 are the most"):
        Classifier(str(single))(TASK, ["1" * 32])


async def test_it_is_a_reward_function_of_a_config(single: Path) -> None:
    options = {"path": str(single)}
    liked = {"function": "asyncrl.rewards.classifier:Classifier", "per": "group", "options": options}
    scorer = Scorer.from_config(RewardConfig(function=None, functions={"liked": liked}))
    scorer.start()
    scores = await scorer.score_group(TASK, TEXTS, [rollout([1, 2, 3], 2)] * len(TEXTS))
    assert [score.parts.keys() for score in scores] == [{"liked"}] * len(TEXTS)
    assert scores[0].reward == pytest.approx(plain(single, "12+34=46$")[0], abs=1e-5)
    scorer.close()
