"""`asyncrl import`: configurations of verl and TRL as ours, and the keys that have no counterpart."""

from __future__ import annotations

import json
import subprocess
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from missing import PEER_PYTHON, needs_peers

from asyncrl import cli
from asyncrl.config.load import all_keys, hint_of, load_config
from asyncrl.config.migration import translation, trl, verl
from asyncrl.config.migration.translation import Translation, translate
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError

DATA = Path(__file__).parents[3] / "data" / "migration"
TOGETHER = {"verl": verl.together, "TRL": trl.together}
each_trainer = pytest.mark.parametrize("trainer", TOGETHER)


def example(trainer: str) -> Path:
    return DATA / f"{trainer.lower()}.yaml"


def translated(trainer: str, path: Path, *words: str) -> Translation:
    return translate(trainer, TOGETHER[trainer], path, words)


def loaded(made: Translation, folder: Path) -> Config:
    """As a user does it: the text becomes a file."""
    file = folder / "mine.yaml"
    file.write_text(made.text("theirs"))
    return load_config(file)


def of_words(trainer: str, folder: Path, *words: str) -> dict[str, Any]:
    """The settings of an empty file and these words."""
    (folder / "empty.yaml").write_text("{}")
    return translated(trainer, folder / "empty.yaml", *words).tree


@pytest.fixture(scope="module")
def of_verl(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return loaded(translated("verl", example("verl")), tmp_path_factory.mktemp("of_verl"))


def test_a_batch_of_verl(of_verl: Config) -> None:
    batch, learner, generator = of_verl.batch, of_verl.learner, of_verl.generator
    assert (batch.groups, batch.group_size) == (512, 16)
    assert (learner.mini_batches, learner.epochs, of_verl.run.versions) == (4, 2, 90)
    assert (generator.max_length, generator.max_tokens, generator.temperature) == (4096, 3072, 0.8)
    assert (generator.engine, generator.vllm.tensor_parallel, of_verl.queue.max_staleness) == ("vllm", 4, 0)
    assert (of_verl.tasks.source, of_verl.tasks.max_prompt_tokens) == ("data/math/train.parquet", 1024)
    held_out = of_verl.evaluation
    assert (held_out.source, held_out.samples, held_out.top_p) == ("data/math/test.parquet", 4, 0.95)


def test_an_algorithm_of_verl(of_verl: Config) -> None:
    algorithm, correction = of_verl.algorithm, of_verl.algorithm.correction
    assert (algorithm.advantage, algorithm.loss, algorithm.proximal) == ("dr_grpo", "ppo", "frozen")
    assert (algorithm.clip_low, algorithm.clip_high, algorithm.dual_clip) == (0.2, 0.28, 10.0)
    assert (algorithm.aggregation, algorithm.norm_tokens) == ("seq-mean-token-sum-norm", 4096)
    assert (algorithm.kl_loss.coef, algorithm.kl_loss.form, algorithm.shaping.kl_coef) == (0.002, "k3", 0)
    assert (correction.kind, correction.level, correction.low, correction.high) == (
        *("icepop", "sequence"),
        *(0.5, 2.0),
    )
    # verl keeps μ/π_p in [0.25, 2], which is π_p/μ in [0.5, 4].
    assert (correction.reject, correction.reject_low, correction.reject_high) == ("seq_mean_k1", 0.5, 4.0)
    assert (algorithm.shaping.overlong_buffer, algorithm.shaping.overlong_penalty) == (512, 0.5)


def test_the_rest_of_verl(of_verl: Config) -> None:
    learner, optimizer = of_verl.learner, of_verl.learner.optimizer
    assert (optimizer.lr, optimizer.warmup_steps, optimizer.weight_decay) == (2e-6, 20, 0.1)
    assert (optimizer.schedule, optimizer.min_lr_ratio, optimizer.grad_clip) == ("cosine", 0.05, 0.5)
    assert (learner.parallel.context, learner.offload, learner.activation_checkpointing) == (
        *(2, "optimizer"),
        "layers",
    )
    model = of_verl.model
    assert (model.dtype, model.lora.rank, len(model.lora.targets)) == ("bfloat16", 32, 7)
    assert of_verl.reward.function == "asyncrl.rewards:Verl"
    assert of_verl.reward.options == {
        "path": "rewards/mine.py",
        "name": "score",
        "options": {"strict": True},
        "data_source": "data_source",
    }
    assert (of_verl.run.name, of_verl.run.seed, of_verl.telemetry.trackers) == ("math-first", 11, ("wandb",))


def test_a_configuration_of_trl(tmp_path: Path) -> None:
    config = loaded(translated("TRL", example("TRL"), "num_processes=2"), tmp_path)
    # 8 × 2 × 16 completions of 16 a prompt; 16 / 4 optimizer steps, twice: 200 steps are 25 versions.
    assert (config.batch.groups, config.batch.group_size) == (16, 16)
    assert (config.learner.mini_batches, config.learner.epochs, config.run.versions) == (4, 2, 25)
    assert (config.checkpoint.every, config.run.seed) == (8, 5)
    algorithm, correction = config.algorithm, config.algorithm.correction
    assert (algorithm.loss, algorithm.aggregation, algorithm.advantage) == (
        *("ppo", "seq-mean-token-sum-norm"),
        "dr_grpo",
    )
    assert (algorithm.clip_low, algorithm.clip_high, algorithm.dual_clip) == (0.2, 0.28, 4.0)
    assert (correction.kind, correction.level, correction.high, algorithm.proximal) == (
        *("tis", "token", 2.0),
        "frozen",
    )
    assert (algorithm.kl_loss.coef, config.learner.optimizer.betas) == (0.04, (0.9, 0.99))
    assert (config.tasks.source, config.tasks.options) == (
        "hf:org/maths",
        {"split": "train", "subset": "hard"},
    )
    assert config.generator.server.urls == ["http://127.0.0.1:8100"]
    assert config.reward.weights == {
        "accuracy_reward": 1.0,
        "get_soft_overlong_punishment": 0.5,
        "short": 0.25,
    }
    assert config.reward.functions["short"] == {
        "function": "asyncrl.rewards:Trl",
        "per": "group",
        "options": {"function": "my_rewards.style:short"},
    }


@each_trainer
def test_what_has_no_counterpart_is_listed_with_a_reason(trainer: str) -> None:
    left = translated(trainer, example(trainer)).left
    reasons = {
        "verl": {
            "my_plugin.speed": "no key is known",
            "trainer.a_key_of_tomorrow": "no key is known",
            "algorithm.kl_ctrl.kl_coef": "counts only with algorithm.use_kl_in_reward=true",
            "actor_rollout_ref.actor.clip_ratio": "clip_ratio_low",
            "actor_rollout_ref.rollout.gpu_memory_utilization": "gpu_memory_share",
            "trainer.logger": "tensorboard, wandb, mlflow, trackio",
            "defaults": "--cfg job",
        },
        "TRL": {
            "a_key_of_tomorrow": "no key is known",
            "top_entropy_quantile": "docs/own_algorithm.md",
            "mask_truncated_completions": "overlong_buffer",
            "use_bias_correction_kl": "plain k3",
            "num_processes": "num_processes=N",
        },
    }[trainer]
    assert {key: why for key, why in reasons.items() if why not in left[key]} == {}


@each_trainer
def test_every_given_key_is_named(trainer: str) -> None:
    text = translated(trainer, example(trainer)).text("theirs")
    keys = translated(trainer, example(trainer)).given
    assert [key for key in keys if key not in text] == []
    assert "To be corrected" not in text


def test_keys_that_nobody_knows_are_named(tmp_path: Path) -> None:
    strange = {"x": None, "y": "a: b", "z.w": [1, {"a": 2}], "": True, "${u}": 1}
    (tmp_path / "theirs.json").write_text(json.dumps(strange))
    made = translated("TRL", tmp_path / "theirs.json")
    assert made.left.keys() >= strange.keys()
    text = made.text("theirs")
    assert all(f"#   {key} = " in text for key in strange)


@pytest.mark.parametrize(
    ("trainer", "words", "expected"),
    [
        ("verl", [], {"algorithm.advantage": "gae", "algorithm.clip_high": 0.2, "algorithm.dual_clip": 3.0}),
        ("verl", ["actor_rollout_ref.actor.policy_loss.loss_mode=sapo"], {"algorithm.sapo_tau": [1.0, 1.05]}),
        (
            "verl",
            [f"actor_rollout_ref.actor.policy_loss.{key}" for key in ("loss_mode=dro", "dro_beta=0.05")],
            {"algorithm.loss": "dro", "algorithm.dro_beta": 0.05},
        ),
        (
            "verl",
            [
                "algorithm.adv_estimator=tir_optimal_token_baseline",
                "actor_rollout_ref.actor.calculate_sum_pi_squared=true",
            ],
            {"algorithm.advantage": "optimal_token_baseline"},
        ),
        ("verl", ["actor_rollout_ref.rollout.top_p=0.9"], {"algorithm.truncated": "weigh"}),
        (
            "verl",
            ["algorithm.rollout_correction.rollout_is=token"],
            {"algorithm.correction.kind": "tis", "algorithm.correction.level": "token"},
        ),
        (
            "verl",
            [
                "algorithm.rollout_correction.rollout_rs=token_k1",
                "algorithm.rollout_correction.rollout_rs_threshold=4",
            ],
            {"algorithm.correction.reject_high": 4.0, "algorithm.correction.reject": "token_k1"},
        ),
        (
            "verl",
            [
                "algorithm.rollout_correction.rollout_rs=seq_max_k2,token_k1",
                "algorithm.rollout_correction.rollout_rs_threshold=0.5,0.25_2",
            ],
            {
                "algorithm.correction.reject": "token_k1",  # whose bounds are no inverses of each other
                "algorithm.correction.reject_low": 0.5,
                "algorithm.correction.reject_high": 4.0,
                "algorithm.correction.also_reject": {"seq_max_k2": 0.5},
            },
        ),
        (
            "verl",
            [
                *("async_training.staleness_threshold=0.5", "async_training.trigger_parameter_sync_step=4"),
                *("actor_rollout_ref.actor.ppo_mini_batch_size=32", "async_training.require_batches=2"),
            ],
            {"batch.groups": 256, "learner.mini_batches": 8, "queue.max_staleness": 1},
        ),
        (
            "verl",
            ["reward.reward_model.enable=true", "reward.reward_model.model_path=org/judge"],
            {
                "reward.function": "asyncrl.rewards.classifier:Classifier",
                "reward.options": {"path": "org/judge"},
            },
        ),
        (
            "verl",
            ["trainer.v1.trainer_mode=separate_async", "trainer.v1.sampler.max_off_policy_threshold=3"],
            {"queue.max_staleness": 3},
        ),
        ("TRL", [], {"learner.optimizer.schedule": "linear", "batch.groups": 1, "algorithm.clip_high": 0.2}),
        (
            "TRL",
            ["loss_type=cispo", "epsilon_high=5.0"],
            {"algorithm.loss": "cispo", "algorithm.clip_high": 4.0, "algorithm.clip_low": 1.0},
        ),
        ("TRL", ["importance_sampling_level=sequence", "loss_type=grpo"], {"algorithm.loss": "gspo"}),
        ("TRL", ["multi_objective_aggregation=normalize_then_sum"], {"algorithm.advantage": "gdpo"}),
        (
            "TRL",
            ["use_vllm=true"],
            {"algorithm.correction.kind": "icepop", "algorithm.correction.level": "sequence"},
        ),
    ],
)
def test_words_and_defaults(tmp_path: Path, trainer: str, words: list[str], expected: dict[str, Any]) -> None:
    made = of_words(trainer, tmp_path, *words)
    assert {key: made.get(key) for key in expected} == expected


def test_a_default_that_is_ours_too_is_not_repeated(tmp_path: Path) -> None:
    assert "algorithm.aggregation" not in of_words("verl", tmp_path)
    word = "actor_rollout_ref.actor.loss_agg_mode=token-mean"
    assert of_words("verl", tmp_path, word)["algorithm.aggregation"] == "token-mean"


def test_what_a_reference_needs_may_lack(tmp_path: Path) -> None:
    path = tmp_path / "theirs.yaml"
    path.write_text("data: {max_response_length: '${not.here}', train_files: '${oc.env:HOME}/a.parquet'}")
    made = translated("verl", path)
    assert made.left["data.max_response_length"].startswith("${not.here} refers to what the file lacks")
    assert made.tree["tasks.source"] == f"{Path.home()}/a.parquet"


def test_a_text_in_place_of_a_number_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^data\.train_batch_size = 'many': must be a number"):
        of_words("verl", tmp_path, "data.train_batch_size=many")


def test_what_does_not_load_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("{}")
    text = translated("TRL", tmp_path / "empty.yaml").text("theirs")
    assert "# To be corrected:\n#   model.path" in text


def test_keys_of_one_pattern_are_named_on_lines_of_their_own(tmp_path: Path) -> None:
    words = [f"hydra.key-{'x' * 40}{number}=1" for number in range(5)]
    (tmp_path / "empty.yaml").write_text("{}")
    lines = translated("verl", tmp_path / "empty.yaml", *words).text("theirs").splitlines()
    first = lines.index("#   hydra.*: read by Hydra alone")
    listed = [name for line in lines[first + 1 : first + 4] for name in line[1:].replace(",", "").split()]
    assert listed == [word.removesuffix("=1") for word in words]


def test_no_means_that_nothing_is_evaluated_or_saved(tmp_path: Path) -> None:
    """It is false in YAML."""
    words = ["eval_strategy=no", "save_strategy=no", "dataset_name=org/a"]
    made = of_words("TRL", tmp_path, *words)
    assert [key for key in made if key.startswith(("evaluation", "checkpoint"))] == []
    assert (
        of_words("TRL", tmp_path, "eval_strategy=steps", "dataset_name=org/a")["evaluation.source"]
        == "hf:org/a"
    )


def literals(hint: Any) -> list[Any]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return [one for part in typing.get_args(hint) for one in literals(part)]
    return [*typing.get_args(hint)] if typing.get_origin(hint) is typing.Literal else []


@each_trainer
def test_tables_lead_to_keys_and_values_that_there_are(trainer: str) -> None:
    """One row for each key: a wrong name would show only for the user that has it."""
    file = Path(translation.__file__).with_name(f"{trainer.lower()}.yaml")
    for key, row in yaml.safe_load(file.read_text())["rows"].items():
        targets = [
            pair
            for value in row.get("values", {}).values()
            for pair in (value.items() if isinstance(value, dict) else [(row["to"], value)])
        ]
        for ours, value in [*targets, (row.get("to"), None)]:
            assert ours is None or ours in all_keys(), key
            assert value is None or not literals(hint_of(ours)) or value in literals(hint_of(ours)), key
        assert {"to", "why", "default", "when"} & row.keys() or not row, key


@needs_peers
@pytest.mark.slow
def test_tables_have_the_defaults_of_verl_itself(tmp_path: Path) -> None:
    (path,) = PEER_PYTHON.parents[1].glob("lib/*/*/verl/trainer/config/_generated_ppo_trainer.yaml")
    made = translated("verl", path)
    needed = {
        "actor_rollout_ref.model.path",
        "critic.model.path",
        "actor_rollout_ref.rollout.engine_kwargs.vllm",
    }
    assert differing(made, made.given) == needed
    text = made.text("theirs")
    assert [key for key in made.given if key not in text] == []
    assert loaded(made, tmp_path).algorithm.dual_clip == 3.0


@needs_peers
@pytest.mark.slow
def test_tables_have_the_defaults_of_trl_itself() -> None:
    code = (
        "import json; from trl import GRPOConfig, ModelConfig\n"
        "print(json.dumps({**vars(ModelConfig()), **{name: one.default for name, one in "
        "GRPOConfig.__dataclass_fields__.items()}}, default=str))"
    )
    child = subprocess.run(
        [PEER_PYTHON, "-W", "ignore", "-c", code], capture_output=True, timeout=250, check=True
    )
    theirs = json.loads(child.stdout.splitlines()[-1])
    made = Translation("TRL", theirs, translate("TRL", trl.together, DATA / "trl.yaml", ()).rows)
    # TRL means true, 0 and 1024 beside these.
    assert differing(made, theirs) == {"bf16", "vllm_importance_sampling_clip_min"}


def differing(made: Translation, theirs: Mapping[str, Any]) -> set[str]:
    """Rows with a target whose default is not that of the trainer."""
    rows = {key: row for key, row in made.rows.items() if row.default is not None or row.to is not None}
    return {
        key
        for key, row in rows.items()
        if key in theirs and row.default != theirs[key] and row.default != str(theirs[key])
    }


def test_the_command_prints_what_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["import", "verl", str(example("verl")), "data.train_batch_size=256", "data.seed=3"]
    assert cli.main(words) == 0
    (tmp_path / "mine.yaml").write_text(capsys.readouterr().out)
    config = load_config(tmp_path / "mine.yaml")
    assert (config.batch.groups, config.learner.mini_batches, config.run.seed) == (256, 2, 3)
    assert cli.main(["import", "trl", str(tmp_path / "gone.yaml")]) == 2
    assert "gone.yaml" in capsys.readouterr().err
