from __future__ import annotations

import dataclasses
import stat
from pathlib import Path

import pytest

from asyncrl import cli
from asyncrl.config.commented_yaml import key_comments, render
from asyncrl.config.load import CONFIGS, all_keys, load_config, save_config, sections
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError

BASE = """\
model: {path: some/model}
tasks:
  source: some.module:function
reward:
  function: some.module:reward
"""


def error_of(path: Path, *overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return caught.value


def test_the_schema_is_walked_once_and_not_for_every_setting() -> None:
    """Every process of a run reads a saved config of 300 settings, each of which is looked up in the schema."""
    assert sections(Config) is sections(Config)
    assert all_keys() is all_keys()


def test_command_line_wins_over_file_and_file_over_include(tmp_path: Path, base: Path) -> None:
    (tmp_path / "more.yaml").write_text("batch: {groups: 8, group_size: 4}\nrun: {seed: 1, versions: 7}\n")
    top = tmp_path / "top.yaml"
    top.write_text("include: [base.yaml, more.yaml]\nrun: {seed: 2}\nbatch:\n  groups: 16\n")
    config = load_config(top, ["batch.groups=32"])
    assert (config.batch.groups, config.batch.group_size) == (32, 4)
    assert (config.run.seed, config.run.versions) == (2, 7)


def test_include_falls_back_to_the_configs_of_the_project(tmp_path: Path, base: Path) -> None:
    top = tmp_path / "top.yaml"
    top.write_text("include: [base.yaml, algorithms/rloo.yaml]\n")
    assert load_config(top).algorithm.advantage == "rloo"


def test_files_that_include_each_other(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("include: b.yaml\n")
    (tmp_path / "b.yaml").write_text("include: a.yaml\n")
    error = error_of(tmp_path / "a.yaml")
    assert error.key == "include"
    assert "a.yaml → " in str(error)


def test_options_are_free_and_merged(base: Path) -> None:
    config = load_config(base, ["tasks.options.digits=3", "tasks.options.names=[a, b]"])
    assert config.tasks.options == {"digits": 3, "names": ["a", "b"]}


def test_weights_of_reward_parts_are_set_one_by_one(base: Path) -> None:
    config = load_config(base, ["reward.weights.cost=0", "reward.weights.short=0.5"])
    assert config.reward.weights == {"cost": 0.0, "short": 0.5}
    error = error_of(base, "reward.weights.cost=.nan")
    assert (error.key, error.remedy) == (
        "reward.weights.cost",
        "set reward.weights.cost=0 for a part that is only logged",
    )


def test_numbers_in_exponent_form_and_interpolation(base: Path) -> None:
    config = load_config(base, ["learner.optimizer.lr=2e-4", "model.path=${run.dir}/warm"])
    assert config.learner.optimizer.lr == 0.0002
    assert config.model.path == "runs/warm"


@pytest.mark.parametrize(
    ("word", "key", "neighbour"),
    [
        ("batch.group=3", "batch.group", "batch.groups"),
        ("group_size=4", "group_size", "batch.group_size"),
        ("queue.max_stalenes=1", "queue.max_stalenes", "queue.max_staleness"),
        ("learner.lr=1", "learner.lr", "learner.optimizer.lr"),
    ],
)
def test_unknown_key_names_its_neighbour(base: Path, word: str, key: str, neighbour: str) -> None:
    error = error_of(base, word)
    assert error.key == key
    assert error.remedy == f"did you mean {neighbour}?"


def test_errors_of_a_file_name_file_and_line(base: Path) -> None:
    base.write_text(BASE + "batch:\n  groups: 64\n  grups: 3\n")
    error = error_of(base)
    assert error.key == "batch.grups"
    assert f"{base}:8" in error.rule


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("batch.groups=many", "batch.groups"),
        ("run.seed=1.5", "run.seed"),
        ("run.seed=null", "run.seed"),
        ("batch=3", "batch"),
        ("generator.engine=magic", "generator.engine"),
        ("learner.optimizer.betas=[1, 2, 3]", "learner.optimizer.betas"),
        ("run.dir=${run.such}", "run.dir"),
        ("model.path=[", "model.path"),
        ("batch.groups", "command line"),
    ],
)
def test_bad_values_are_config_errors(base: Path, word: str, key: str) -> None:
    assert error_of(base, word).key == key


def test_rules_of_the_schema_come_through(base: Path) -> None:
    assert error_of(base, "batch.group_size=1").key == "batch.group_size"
    assert error_of(base, "run.versions=0").key == "run.versions"


@pytest.mark.parametrize(
    ("words", "key", "rule"),
    [
        (["generator.engine=transformers"], "sync.backend", "is for generator.engine=vllm"),
        (["sync.verify=true"], "sync.verify", "whose loader alone has the places of weights"),
        (["sync.delta=always"], "sync.delta", "which sends whole versions"),
        (["sync.fanout=2"], "sync.fanout", "engines hand nothing on"),
        (["sync.staging=host"], "sync.staging", "loads a version as it comes"),
        (["sync.folder=/weights"], "sync.folder", "goes with sync.backend=file"),
        (["generator.kv=drain"], "generator.kv", "until all samples have ended"),
        (
            ["generator.vllm.extra={weight_transfer_config: {backend: ipc}}"],
            "generator.vllm.extra",
            "which sync.backend=vllm sets",
        ),
    ],
)
def test_weights_by_vllms_own_transfer_refuse_keys_of_other_paths_by_name(
    base: Path, words: list[str], key: str, rule: str
) -> None:
    own = ["generator.engine=vllm", "sync.backend=vllm", "sync.verify=false"]
    load_config(base, own)
    error = error_of(base, *own, *words)
    assert (error.key, rule in error.rule) == (key, True)


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["generator.engine=vllm_server", "generator.server.urls=[http://127.0.0.1:1]"], "generator.engine"),
        (["learner.compile=true"], "learner.compile"),
        (["learner.parallel.tensor=2", "learner.processes=2"], "learner.parallel.tensor"),
    ],
)
def test_recorded_experts_are_refused_where_nothing_records_or_takes_them(
    base: Path, words: list[str], key: str
) -> None:
    load_config(base, ["model.router_replay=true"])
    error = error_of(base, "model.router_replay=true", *words)
    assert (error.key, "experts" in error.rule or "routers" in error.rule) == (key, True)


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["queue.store=redis"], "queue.redis_url"),
        (["queue.redis_url=redis://127.0.0.1"], "queue.redis_url"),
        (["queue.store=memory", "queue.durable=payload"], "queue.durable"),
        (["queue.store=memory", "queue.fsync=true"], "queue.fsync"),
        (["queue.store=redis", "queue.redis_url=redis://127.0.0.1", "queue.fsync=true"], "queue.fsync"),
        (["queue.store=disk"], "queue.store"),
    ],
)
def test_what_a_queue_keeps_must_have_a_place(base: Path, words: list[str], key: str) -> None:
    assert error_of(base, *words).key == key


def test_a_required_key_without_a_value(base: Path) -> None:
    base.write_text("model: {path: x}\n")
    error = error_of(base)
    assert (error.key, error.rule) == ("reward.function", "must be set")


@pytest.mark.parametrize("text", ["run: [", "run:\n  seed: 1\n  seed: 2\n", "- a\n- b\n"])
def test_files_that_are_no_configuration(base: Path, text: str) -> None:
    base.write_text(text)
    assert str(base) in str(error_of(base))


def test_missing_file(tmp_path: Path) -> None:
    error = error_of(tmp_path / "nowhere.yaml")
    assert error.rule == "No such file or directory"


def test_rendered_text_reads_back_as_the_same_config(tmp_path: Path, base: Path) -> None:
    config = load_config(base, ["tasks.options={a: [1, {b: x}], c: 'yes'}", "run.name='5'", "queue.window=3"])
    save_config(config, tmp_path / "saved.yaml")
    assert load_config(tmp_path / "saved.yaml") == config


def test_rendered_text_explains_keys_and_shows_what_is_derived(base: Path) -> None:
    text = render(load_config(base, ["batch.groups=8"]))
    assert "W = 9 (queue.window), S = 1 spare versions, queue.depth = 24" in text
    line = next(line for line in text.splitlines() if line.startswith("  groups: 8 "))
    assert line.endswith("# B: groups that one version is trained on")


def test_comments_over_several_lines_are_joined() -> None:
    assert key_comments()["queue.window"].endswith(
        "none: 1 (strict order) up to η = 1, else batch.groups + 1"
    )
    assert set(key_comments()) <= set(all_keys())


@pytest.mark.parametrize("recipe", sorted(CONFIGS.glob("recipes/*.yaml")), ids=lambda path: path.name)
def test_every_recipe_is_valid(recipe: Path) -> None:
    load_config(recipe)


def test_every_algorithm_can_be_included_and_is_one_of_its_own(tmp_path: Path, base: Path) -> None:
    top = tmp_path / "top.yaml"
    made = {}
    for path in CONFIGS.glob("algorithms/*.yaml"):
        top.write_text(f"include: [base.yaml, algorithms/{path.name}]\nteacher: {{path: there}}\n")
        config = load_config(top)
        assert config not in made.values(), f"{path.stem} is {[n for n, c in made.items() if c == config]}"
        made[path.stem] = config


@pytest.mark.parametrize("include", ["5", "[5]", "{a: b}", "[[a.yaml]]"])
def test_an_include_that_names_no_file(tmp_path: Path, include: str) -> None:
    path = tmp_path / "top.yaml"
    path.write_text(f"include: {include}\n")
    assert error_of(path).key == "include"


def test_an_include_may_be_empty(base: Path) -> None:
    base.write_text(f"include:\n{BASE}")
    assert load_config(base).model.path == "some/model"


DOLLARS = """\
run: {name: named}
model: {path: some/model}
tasks: {source: some.module:function}
reward: {function: "some.module:reward", options: {pattern: '\\$${', own: ['${x}']}}
evaluation: {sets: {hard: {source: h.jsonl, system: 'cost ${'}}}
"""


def test_dollars_are_text_unless_they_name_a_key(tmp_path: Path, base: Path) -> None:
    base.write_text(DOLLARS)
    prompts = ["tasks.system='cost ${ of ${run.name}'", "tasks.options.a='\\${run.name} ${HOME}'"]
    config = load_config(base, prompts)
    assert config.tasks.system == "cost ${ of named"
    assert config.tasks.options == {"a": "${run.name} ${HOME}"}
    assert config.reward.options == {"pattern": "\\$${", "own": ["${x}"]}
    assert config.evaluation.named_sets["hard"].system == "cost ${"
    save_config(config, tmp_path / "saved.yaml")
    assert load_config(tmp_path / "saved.yaml") == config


@pytest.mark.parametrize(
    "word",
    [
        *("generator.count=0", "generator.count=-1", "generator.threads=0", "learner.threads=0"),
        *("queue.window=0", "queue.depth=-1", "queue.retained_bytes=-1", "learner.groups_deadline_s=0"),
        *("learner.optimizer.warmup_steps=-3", "learner.optimizer.weight_decay=-1"),
        *("learner.optimizer.betas=[0.9, 1.0]", "learner.optimizer.min_lr_ratio=2"),
        *("launch.generator_restarts=-1", "launch.stop_deadline_s=0", "sft.optimizer.warmup_steps=-1"),
        "agent.max_tokens=0",
    ],
)
def test_numbers_out_of_their_range(base: Path, word: str) -> None:
    assert error_of(base, word).key == word.partition("=")[0]


def test_a_whole_number_may_have_an_exponent(base: Path) -> None:
    config = load_config(base, ["run.versions=1e3", "queue.window=2e0"])
    assert (config.run.versions, config.queue.window) == (1000, 2)
    assert error_of(base, "run.versions=1.5").key == "run.versions"


def test_a_value_that_is_none_is_told_what_it_must_be(base: Path) -> None:
    error = error_of(base, "run.seed=")
    assert (error.rule, error.remedy) == (
        "must have a value (command line)",
        "give a whole number: fixes task order, sampling and initialisation",
    )
    assert error_of(base, "queue.window=many").remedy.startswith("give a whole number, or null: W: ")
    assert error_of(base, "learner.on_bad_step=go").remedy.startswith("give stop or skip: ")


@pytest.mark.parametrize("address", ["localhost:5555", "node:5555", "http://node:5555"])
def test_an_address_must_say_how_it_is_reached(base: Path, address: str) -> None:
    error = error_of(base, f"queue.address={address}")
    assert (error.key, error.remedy) == (
        "queue.address",
        f"set queue.address=tcp://{address.rpartition('://')[2]}",
    )


@pytest.mark.parametrize(
    "where", ["127.0.0.1:65536", "::1:5555", "localhost", "127.0.0.1:-1", "127.0.0.1:5555/"]
)
def test_an_address_without_a_host_and_a_port_is_refused(base: Path, where: str) -> None:
    """ZeroMQ takes port 65536 as 0."""
    for right in ("tcp://127.0.0.1:65535", "tcp://localhost:0", "tcp://[::1]:*", "ipc:///tmp/queue"):
        load_config(base, [f"queue.address={right}"])
    error = error_of(base, f"queue.address=tcp://{where}")
    assert (error.key, error.rule) == ("queue.address", "has no host with a port up to 65535 behind it")


@pytest.mark.parametrize("key", ["queue.address=tcp://10.0.0.1:5555", "sync.host=10.0.0.1", "sync.host=node"])
def test_a_socket_that_other_machines_reach_needs_keys(base: Path, key: str) -> None:
    error = error_of(base, key)
    assert error.key == key.partition("=")[0]
    assert error.rule == "can be reached from other machines, and queue.keys is not set"
    load_config(base, [key, "queue.keys=/keys"])


@pytest.mark.parametrize("host", ["0.0.0.0", "'::'", "'*'", "''"])
def test_generators_cannot_connect_to_every_address(base: Path, host: str) -> None:
    assert error_of(base, f"sync.host={host}", "queue.keys=/keys").key == "sync.host"


@pytest.mark.parametrize("host", ["tcp://10.0.0.1", "10.0.0.1:5555", "tcp://10.0.0.1:5555"])
def test_a_host_has_no_scheme_and_no_port(base: Path, host: str) -> None:
    error = error_of(base, f"sync.host={host}", "queue.keys=/keys")
    assert (error.key, error.rule) == ("sync.host", "is no plain host name or address")
    load_config(base, ["sync.host=fe80::1", "queue.keys=/keys"])
    load_config(base, ["sync.host=127.0.0.1"])


def test_null_empties_a_mapping_and_more_is_merged_in(base: Path) -> None:
    base.write_text(BASE.replace("reward:\n", "reward:\n  weights: {style: 0.5}\n"))
    assert load_config(base).reward.weights == {"style": 0.5}
    assert load_config(base, ["reward.weights=null"]).reward.weights == {}
    replaced = load_config(base, ["reward.weights=null", "reward.weights.cost=0"])
    assert replaced.reward.weights == {"cost": 0.0}


@pytest.mark.parametrize("password", ["two words", "it's", 'a"b', "p@ss"])
def test_any_password_is_masked_and_its_file_is_for_its_owner_alone(tmp_path: Path, password: str) -> None:
    path, url = tmp_path / "config.yaml", f"redis://me:{password}@host:6379/0"
    config = Config()
    config = dataclasses.replace(
        config, queue=dataclasses.replace(config.queue, store="redis", redis_url=url)
    )
    save_config(config, path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    text = render(config, show_passwords=False)
    assert "redis://me:***@host:6379/0" in text
    assert password not in text
    assert password not in repr(str(ConfigError("queue.redis_url", url, "is wrong", "correct it")))


def test_a_word_mends_a_wrong_value_of_the_file(tmp_path: Path, base: Path) -> None:
    top = tmp_path / "top.yaml"
    top.write_text("include: [base.yaml]\nalgorithm: {advantage: gaee}\n")
    assert error_of(top).key == "algorithm.advantage"
    assert load_config(top, ["algorithm.advantage=rloo"]).algorithm.advantage == "rloo"
    assert error_of(top, "algorithm.advantage=rlooo").value == "rlooo"


def test_mappings_of_file_and_words_are_merged(tmp_path: Path, base: Path) -> None:
    top = tmp_path / "top.yaml"
    top.write_text("include: [base.yaml]\nreward: {weights: {right: 2.0}}\n")
    assert load_config(top, ["reward.weights={style: 0.5}"]).reward.weights == {"right": 2.0, "style": 0.5}


def test_a_misspelt_include_is_answered_with_the_nearest_file(tmp_path: Path) -> None:
    top = tmp_path / "top.yaml"
    top.write_text("include: [algorithms/grop.yaml]\n")
    assert error_of(top).remedy == "did you mean algorithms/grpo.yaml?"


def test_a_section_that_is_given_a_word_is_answered_with_its_key(tmp_path: Path) -> None:
    top = tmp_path / "top.yaml"
    top.write_text("model: my-model\n")
    assert "write model: {path: my-model}" in error_of(top).remedy


def keys_of(path: Path, *words: str) -> list[str]:
    return [error.key for error in error_of(path, *words).each]


def test_every_key_and_value_that_is_wrong_by_itself_is_named_at_once(base: Path) -> None:
    base.write_text("batch:\n  groups: 0\n  grups: 3\nrun: {seed: -1, versions: many}\n")
    named = keys_of(base, "generator.engine=magic")
    assert sorted(named) == [
        *("batch.groups", "batch.grups", "generator.engine", "model.path", "reward.function"),
        *("run.seed", "run.versions"),
    ]


@pytest.mark.parametrize(
    ("words", "fits"),
    [
        ("tensor_parallel=2", True),
        ("tensor_parallel=3", False),
        ("tensor_parallel=2 generator.vllm.data_parallel=2", False),
        ("tensor_parallel=2 generator.count=2", False),
        ("tensor_parallel=3 generator.engine=transformers", True),
    ],
)
def test_each_rank_of_an_engine_needs_a_gpu_of_its_own(base: Path, words: str, fits: bool) -> None:
    """Generators divide the GPUs of their pool: of two, each of two generators has one."""
    given = ["generator.engine=vllm", "generator.devices='0,1'", *f"generator.vllm.{words}".split()]
    if fits:
        load_config(base, given)
    else:
        assert error_of(base, *given).key == "generator.devices"


@pytest.mark.parametrize(
    ("learner", "words", "fits"),
    [
        ("0", "", False),
        ("0", "generator.vllm.gpu_memory_share=0.45 learner.gpu_memory_share=0.5", True),
        ("1", "", True),
        ("1", "generator.count=2", False),
        ("1", "generator.count=2 generator.vllm.gpu_memory_share=0.5", True),
        ("0", "generator.engine=transformers", True),
    ],
)
def test_shares_of_one_gpu_are_at_most_the_gpu(base: Path, learner: str, words: str, fits: bool) -> None:
    given = ["generator.engine=vllm", "generator.devices='0'", f"learner.devices='{learner}'", *words.split()]
    if fits:
        load_config(base, given)
    else:
        with pytest.raises(
            ConfigError, match=r"generator\.vllm\.gpu_memory_share = .* is more than the GPU has"
        ):
            load_config(base, given)


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("generator.engine=vllm_server generator.server.urls=[http://127.0.0.1:1]", "generator.engine"),
        ("learner.backend=megatron", "learner.backend"),
        ("learner.devices='1'", "learner.devices"),
        ("sync.staging=auto", "sync.staging"),
        ("sync.snapshot_device=device", "sync.snapshot_device"),
        ("sync.backend=nccl", "sync.backend"),
    ],
)
def test_pools_that_take_turns_have_the_same_devices_and_leave_nothing_on_them(
    base: Path, word: str, key: str
) -> None:
    turns = ["placement.colocate=true", "sync.staging=host", "sync.snapshot_device=host"]
    gpus = ["generator.devices='0'", "learner.devices='0'", "generator.engine=vllm"]
    assert load_config(base, [*turns, *gpus]).placement.colocate  # each with nearly all of its memory
    with pytest.raises(ConfigError) as caught:
        load_config(base, [*turns, *gpus, *word.split()])
    assert caught.value.key == key


def test_every_rule_that_is_broken_is_named_at_once(base: Path) -> None:
    words = ["queue.depth=1", "generator.kv=drain", "generator.engine=scripted", "batch.group_size=1"]
    assert keys_of(base, *words) == ["generator.kv", "batch.group_size", "queue.depth"]


def test_rules_are_not_applied_to_values_that_are_wrong_by_themselves(base: Path) -> None:
    assert keys_of(base, "queue.depth=1", "batch.groups=0") == ["batch.groups"]


def test_all_entries_that_users_name_are_looked_at(base: Path) -> None:
    words = ["evaluation.sets.a.samples=4", "evaluation.sets.b.sorce=x", "evaluation.sets.c.source=d"]
    assert keys_of(base, *words) == [
        "evaluation.sets.a.source",
        "evaluation.sets.a.samples",
        "evaluation.sets.b.sorce",
    ]


def test_the_command_line_names_each_error_on_a_line_of_its_own(
    base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["config", str(base), "--rules-only", "batch.groups=0", "run.seed=-1"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(" = ")[0] for line in lines] == [
        "asyncrl config: ConfigError: run.seed",
        "asyncrl config: ConfigError: batch.groups",
    ]
