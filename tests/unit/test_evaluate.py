"""`asyncrl eval` and `generate` answer as the run's generators would: their engine, their frame around a prompt."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl import evaluate
from asyncrl.config.load import load_config
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError
from asyncrl.generator import process
from asyncrl.generator.engines.engine import SampleRequest
from asyncrl.models.loading import load_tokenizer
from asyncrl.types import Turn

CONFIG = """
model: {{path: {model}}}
tasks: {{source: asyncrl.tasks.addition:train, options: {{digits: 1, held_out: 20}}}}
reward: {{function: "asyncrl.tasks.addition:reward"}}
batch: {{groups: 4, group_size: 4}}
generator: {{slots: 32, max_tokens: 8, max_length: 16, threads: 1}}
"""
TEMPLATE = "{% for message in messages %}{{ message.content }}={% endfor %}"
SERVER = ["generator.engine=vllm_server", "generator.server.urls=[http://127.0.0.1:9]"]
MIXED = [
    "tasks.source=null",
    "tasks.options={}",
    "tasks.mixture={a: {source: 'x:y', chat: true}, b: {source: 'x:y'}}",
]


class Echo:
    """An engine that answers with the prompt."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def sample(self, request: SampleRequest) -> list[Turn]:
        ids = request.prompt_ids
        zeros = np.zeros(len(ids))
        return [Turn(ids, ids, zeros.astype(np.float32), zeros.astype(np.int32), "stop")] * request.n


@pytest.fixture
def model(tmp_path: Path, model_folder: Path) -> Path:
    """With a chat template."""
    shutil.copytree(model_folder, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(TEMPLATE)
    return tmp_path / "model"


def config_with(folder: Path, model: Path, *words: str) -> Config:
    (folder / "config.yaml").write_text(CONFIG.format(model=model))
    return load_config(folder / "config.yaml", words)


def answers(config: Config, model: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of Echo in place of vLLM, which must have been asked to load the model."""
    loaded: list[tuple[Any, ...]] = []

    def load(config: Config, *rest: Any) -> Echo:
        assert config.generator.quantization is None
        loaded.append((config.model.path, rest[-1]))
        return Echo()

    monkeypatch.setattr(process, "VllmEngine", load)
    said = evaluate.generate(config, str(model), ["1+2", "3+4="])
    assert loaded == [(str(model), True)]
    return said


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], ["1+2", "3+4="]),
        (["tasks.chat=true"], ["1+2=", "3+4=="]),
        (["generator.quantization=int8"], ["1+2", "3+4="]),
        (["tasks.system='0'"], ["0=1+2=", "0=3+4=="]),
    ],
)
def test_the_engine_and_the_frame_are_those_of_the_run(
    tmp_path: Path, model: Path, words: list[str], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_with(tmp_path, model, "generator.engine=vllm", *words)
    tokenizer = load_tokenizer(config.model)
    assert answers(config, model, monkeypatch) == [
        tokenizer.decode(tokenizer(text)["input_ids"]) for text in expected
    ]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (SERVER, r"generator\.engine = 'vllm_server': uses a server"),
        (["generator.own_engine=mine.py:load"], r"generator\.own_engine = .*from a learner"),
    ],
)
def test_engines_with_weights_of_their_own_are_refused(
    tmp_path: Path, model: Path, words: list[str], says: str
) -> None:
    config = config_with(tmp_path, model, *words)
    with pytest.raises(ConfigError, match=says):
        evaluate.generate(config, str(model), ["1+2="])


def test_a_prompt_has_no_frame_where_sources_differ_in_it(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_with(tmp_path, model, "generator.engine=vllm", *MIXED)
    with pytest.raises(ConfigError, match=r"tasks\.mixture = \['a', 'b'\]: frames the prompts"):
        answers(config, model, monkeypatch)


def test_eval_and_generate_show_how_many_answers_there_are(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: list[tuple[str, int | None, int]] = []

    async def tracked_work(work: Any, what: str, done: Any, total: int | None) -> Any:
        made = await work
        shown.append((what, total, done()))
        return made

    monkeypatch.setattr(evaluate, "tracked_work", tracked_work)
    words = ["source=asyncrl.tasks.addition:heldout", "options={digits: 1, size: 5}", "samples=2"]
    held_out = [f"evaluation.{word}" for word in [*words, "temperature=1.0"]]
    config = config_with(tmp_path, model, "generator.engine=vllm", *held_out)
    answers(config, model, monkeypatch)
    evaluate.evaluate(config, str(model))
    assert shown == [("answers", 2, 2), ("answers", 10, 10)]
