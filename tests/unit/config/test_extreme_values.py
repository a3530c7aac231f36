"""Every key of a configuration with values that nobody means: refused by name, or taken; never a traceback."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import math
import string
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from asyncrl import cli
from asyncrl.config import load
from asyncrl.config.commented_yaml import scalar
from asyncrl.config.config_consistency import as_texts
from asyncrl.config.load import Setting, all_keys, load_config, save_config
from asyncrl.config.schema import Config
from asyncrl.config.yaml_values import parse_yaml
from asyncrl.errors import ConfigError

BASE = """\
model: {path: some/model}
tasks: {source: "some.module:function"}
reward: {function: "some.module:reward"}
"""

EXTREMES: list[Any] = [
    *(math.inf, -math.inf, math.nan, -1, 0, 1e23, 10**40, 1e-320),
    *("", "x" * 10_000, "a\0b", "\ud800", "..", "${", "ü\n\t", "true"),
    *(None, True, [], [-1, math.nan], {"a": {"b": [1]}}, {1: None}),
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Config:
    path = tmp_path_factory.mktemp("config") / "base.yaml"
    path.write_text(BASE)
    return load_config(path)


@functools.cache
def tree_of(section: str) -> Any:
    """The section as it stands while a configuration is filled in."""
    tree = OmegaConf.create({}, flags={"allow_objects": True})
    tree[section] = load._writable(OmegaConf.structured(load.sections(Config)[section]))
    for key in OmegaConf.missing_keys(tree):
        OmegaConf.update(tree, key, "some.module:function")
    return tree


def with_value(config: Config, key: str, value: Any) -> Config:
    """What `load_config` makes of one more setting, without building the other sections anew."""
    section = key.partition(".")[0]
    tree = copy.deepcopy(tree_of(section))
    load._apply(tree, Setting(key, value, "command line"))
    return dataclasses.replace(config, **{section: OmegaConf.to_object(tree[section])})


def value_at(config: Config, key: str) -> Any:
    return functools.reduce(getattr, key.split("."), config)


def refusal_of(config: Config, key: str, value: Any) -> tuple[Config | None, str]:
    """(the configuration, "") or (None, the message)."""
    try:
        return with_value(config, key, value), ""
    except ConfigError as error:
        return None, str(error)
    except OmegaConfBaseException as error:  # `load_config` adds the remedy
        return None, f"{error} Remedy: "


@pytest.mark.parametrize("key", all_keys())
def test_an_extreme_value_is_refused_by_name_or_taken(whole: Config, key: str) -> None:
    for value in EXTREMES:
        made, message = refusal_of(whole, key, value)
        if made is None:
            assert "Remedy: " in message, value
            assert len(message) < 4000, value
            continue
        taken = value_at(made, key)
        assert not (isinstance(taken, float) and not math.isfinite(taken)), value
        again = parse_yaml(f"v: {scalar(taken)}")["v"]
        assert again == (list(taken) if isinstance(taken, tuple) else taken) or "${" in repr(taken)


@pytest.mark.parametrize(
    "word",
    [
        *(
            "run.name=..",
            "run.name='a/b'",
            'run.name="a\\nb"',
            "run.name=.hidden",
            "run.name=-x",
            "run.name=' '",
        ),
        *("run.seed=-1", "batch.groups=1e23", "queue.lease_s=.inf", "queue.lease_s=1e9", "queue.lease_s=0"),
        *("learner.optimizer.lr=.inf", "critic.optimizer.lr=0", "learner.optimizer.betas=[0.9, 1]"),
        *("generator.heartbeat_s=0", "learner.devices=cuda", "generator.devices='0,0'", "run.dir=''"),
        *('run.dir="~a\\0b"', 'model.path="~a\\0b"', 'queue.keys="~a\\0b"'),
        *("run.name=${run.name}", "run.dir=${run.nothing}", "batch.groups=!!int abc", "tasks.options.=3"),
        *("reward.weights={a: {b: 1}}", "reward.weights.a=${run.nothing}"),
        *("tasks.options.n=" + "9" * 5000, "evaluation=null", "device=cuda", "run.versions=\u0661\u0662x"),
        'evaluation.sets={"a\\tb": {source: m:f}}',
    ],
)
def test_the_command_ends_with_2_and_names_the_key(
    base: Path, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["config", str(base), word]) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"asyncrl config: ConfigError: {word.partition('=')[0]}")
    assert "Remedy: " in message


@pytest.mark.parametrize("name", ["../../elsewhere", "..", "a\nb", ""])
def test_the_name_of_a_process_is_a_plain_one(
    base: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["generator", str(base), "queue.address=tcp://127.0.0.1:5", "--name", name]) == 2
    assert "ConfigError: --name = " in capsys.readouterr().err


def test_processes_of_one_gpu_are_refused(base: Path) -> None:
    with pytest.raises(ConfigError, match=r"^learner\.processes = 4: .*set learner\.processes=1"):
        load_config(base, ["learner.processes=4", "learner.devices='0'"])
    with pytest.raises(ConfigError, match=r"^placement\.teacher\.ranks = 2: "):
        load_config(base, [f"placement.teacher.{word}" for word in ("where=pool", "ranks=2", "devices='3'")])


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("algorithm.advantage=grpoo", "did you mean grpo?"),
        ("algorithm.loss=PPO", "did you mean ppo?"),
        ("evaluation=null", "to turn it off, set evaluation.source=null evaluation.sets=null"),
        ("critic=null", "set an algorithm.advantage that needs no critic"),
        ("device=cuda", "GPUs are used where torch sees some"),
        ("batch_size=8", "did you mean batch.groups "),
        ("learning_rate=1e-5", "did you mean learner.optimizer.lr?"),
        ("grop_size=8", "did you mean batch.group_size?"),
    ],
)
def test_a_remedy_leads_on(base: Path, word: str, says: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        load_config(base, [word])
    assert says in refusal.value.remedy


NESTED = "[" * 5000 + "]" * 5000


@contextmanager
def at_most_calls(most: int) -> Iterator[None]:
    """Inside, the function call after so many ends the test: work is counted, whatever the machine is busy with."""
    left = itertools.count(most, -1)

    def count(frame: FrameType, event: str, argument: object) -> None:
        if event.endswith("call") and next(left) < 0:
            sys.setprofile(None)
            pytest.fail(f"more than {most} function calls")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(before)


LAUGHS = "a: &a [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join([f'*{of}'] * 10)}]\n" for of, name in itertools.pairwise("abcdefghijkl")
)


@pytest.mark.parametrize(
    "text",
    [
        f"run: {{name: {NESTED}}}",
        "run: &a {name: *a}",
        "&a [*a]",
        LAUGHS,
        "? [a, b]\n: c",
        "? {a: b}\n: c",
        "run: {seed: !!int abc}",
        "run: {seed: !!python/object:os.system x}",
        "x: y\n" * 300_000,
        "- a\n" * 200_000,
        "\0",
        "include: [a.yaml, a.yaml]",
        "[]",
        "run: {seed: " + "9" * 5000 + "}",
    ],
    ids=str.__len__,
)
def test_a_hostile_file_is_refused_at_once(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("config.yaml", *(f"{letter}.yaml" for letter in string.ascii_lowercase)):
        below = chr(ord(name[0]) + 1) if name != "config.yaml" else "a"
        include = f"include: [{below}.yaml, {below}.yaml]" if text.startswith("include") else text
        (tmp_path / name).write_text("" if name == "z.yaml" else include)
    with at_most_calls(2_000_000):
        assert cli.main(["config", str(tmp_path / "config.yaml")]) == 2
    assert "Remedy: " in capsys.readouterr().err


def test_a_text_that_looks_like_a_number_stays_a_text(base: Path, tmp_path: Path) -> None:
    config = load_config(base, ["run.name='1e5'", "tasks.options={a: '2e-4', b: '.5', c: 2e-4}"])
    save_config(config, tmp_path / "saved.yaml")
    assert load_config(tmp_path / "saved.yaml") == config
    assert config.run.name == "1e5"


PASSWORD = "hun/ter@22"
URL = "redis://me:hun%2Fter%4022@127.0.0.1:6379/0"


def test_a_password_is_in_the_file_that_processes_read_and_nowhere_else(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["queue.store=redis", f"queue.redis_url={URL}"]
    config = load_config(base, words)
    save_config(config, tmp_path / "saved.yaml")
    assert load_config(tmp_path / "saved.yaml") == config
    assert (tmp_path / "saved.yaml").stat().st_mode & 0o077 == 0
    save_config(load_config(base), tmp_path / "open.yaml")
    assert (tmp_path / "open.yaml").stat().st_mode & 0o777 == (base.stat().st_mode & 0o777)
    assert cli.main(["config", str(base), *words, "--rules-only", "--print"]) == 0
    assert cli.main(["config", str(base), *words, "queue.store=file"]) == 2
    assert (
        cli.main(["config", str(base), "queue.store=redis", f"queue.redis_url=redis://:{PASSWORD}@h/0"]) == 2
    )
    shown = "".join(capsys.readouterr()) + "".join(as_texts(config).values())
    assert "redis://me:***@127.0.0.1:6379/0" in shown
    assert not [part for part in ("hun%", "hun/", "ter@", "22@", "4022") if part in shown]


def test_a_configuration_is_replaced_whole(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "saved.yaml"
    save_config(load_config(base), path)
    before = path.read_text()
    monkeypatch.setattr("os.fsync", lambda descriptor: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(OSError, match=r"No space left .* free"):
        save_config(load_config(base, ["run.seed=5"]), path)
    assert path.read_text() == before
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["base.yaml", "saved.yaml"]
