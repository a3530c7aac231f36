from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from processes import signals_must_be_heard

from asyncrl import cli
from asyncrl.errors import AsyncRLError, DeadlineError, RunClosedError, StoppedError

CONFIG = "model: {path: m}\ntasks: {source: a:b}\nreward: {function: a:b}\n"


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    return str(path)


def test_config_prints_every_key(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", config, "--print", "batch.groups=8"]) == 0
    assert "  groups: 8 " in capsys.readouterr().out


def test_overrides_may_follow_options(config: str) -> None:
    words = ["generator", config, "run.seed=1", "--name", "g", "run.seed=2"]
    arguments = cli.parse_words(words)
    assert (arguments.name, arguments.overrides) == ("g", ["run.seed=1", "run.seed=2"])


@pytest.mark.parametrize(
    "words", [[], ["fly"], ["config"], ["config", "x.yaml", "--fly"], ["config", "x.yaml", "-h=1"]]
)
def test_words_that_mean_nothing_exit_2(words: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(words)
    assert stopped.value.code == 2


def test_bad_config_is_one_message_and_exit_2(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", config, "batch.group=1"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "did you mean batch.groups?" in error


def test_a_second_word_makes_another_command(config: str) -> None:
    assert cli.parse_words(["queue", config]).command == "queue"
    status = cli.parse_words(["queue", "status", "demo", "--json"])
    assert (status.command, status.target, status.json) == ("queue status", "demo", True)
    inspect = cli.parse_words(["queue", "inspect", "demo", "7", "--stream", "eval"])
    assert (inspect.command, inspect.ordinal, inspect.stream) == ("queue inspect", 7, "eval")


def test_a_pool_is_named_after_the_config(config: str) -> None:
    for words in (
        ["reference", "batch.groups=2", "--name", "one"],
        ["--name", "one", "reference", "batch.groups=2"],
    ):
        arguments = cli.parse_words(["pool", config, *words])
        assert (arguments.config, arguments.model, arguments.name) == (config, "reference", "one")
        assert arguments.overrides == ["batch.groups=2"]


def test_keys_are_made_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "keys"
    assert cli.main(["keys", str(folder)]) == 0
    assert sorted(path.name for path in folder.iterdir()) == ["client.key", "server.key"]
    assert f"queue.keys={folder}" in capsys.readouterr().out
    assert cli.main(["keys", str(folder)]) == 2


def test_an_address_that_others_can_reach_needs_keys(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", config, "queue.address=tcp://10.0.0.1:5555"]) == 2
    assert "queue.keys is not set. Remedy: make keys with `asyncrl keys DIR`" in capsys.readouterr().err
    words = ["queue.address=tcp://10.0.0.1:5555", "queue.keys=k", "--rules-only"]
    assert cli.main(["config", config, *words]) == 0


@pytest.mark.parametrize("process", ["generator", "learner"])
def test_a_process_of_a_split_run_needs_the_address(
    config: str, process: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([process, config]) == 2
    assert "queue.address = 'tcp://127.0.0.1:*'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "module", "function"),
    [
        (["generator"], "asyncrl.generator.process", "run_generator"),
        (["pool", "reference"], "asyncrl.pool.process", "run_pool"),
    ],
    ids=["generator", "pool"],
)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_worker_that_is_to_stop_gives_back_what_it_holds(
    config: str,
    words: list[str],
    module: str,
    function: str,
    number: signal.Signals,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    returned: list[str] = []

    async def work(*of: object, **more: object) -> None:
        os.kill(os.getpid(), number)
        try:
            await asyncio.sleep(20.0)
        except asyncio.CancelledError:
            returned.append("what it held")
            raise

    monkeypatch.setitem(sys.modules, module, SimpleNamespace(**{function: work}))  # the real one loads torch
    monkeypatch.setattr("asyncrl.tasks.source.held_out", lambda config: {})
    process, *operand = words
    connected = ["queue.address=tcp://127.0.0.1:1", f"run.dir={tmp_path}"]
    with signals_must_be_heard():
        assert cli.main([process, config, *operand, *connected, "--name", "it"]) == 0
    assert returned == ["what it held"]


@pytest.mark.parametrize("words", [["--print"], ["--rules-only"]], ids=["long", "short"])
def test_a_reader_that_has_read_enough_ends_a_command_quietly(
    config: str, words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert cli.main(["config", config, *words]) == 141
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (DeadlineError("a", "b", "c", 1.0), 4),
        (RunClosedError("over"), 0),
        (AsyncRLError("?"), 1),
        (StoppedError("saved"), 10),
        (KeyboardInterrupt(), 130),
    ],
)
def test_errors_become_exit_codes(
    config: str, error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(arguments: cli.Arguments) -> int:
        raise error

    monkeypatch.setitem(cli.COMMANDS, "train", cli.Command(fail, "", "", ""))
    assert cli.main(["train", config]) == code


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), 9),
        (DeadlineError("a", "b", "c", 1.0), 4),
        (RunClosedError("over"), 0),
        (KeyboardInterrupt(), 130),
    ],
)
def test_a_log_that_cannot_be_written_changes_no_exit_code(
    config: str, error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log of a process lies on the disk that is full."""

    def fail(arguments: cli.Arguments) -> int:
        raise error

    monkeypatch.setitem(cli.COMMANDS, "train", cli.Command(fail, "", "", ""))
    with open("/dev/full", "w", buffering=1) as full:
        monkeypatch.setattr(sys, "stdout", full)
        monkeypatch.setattr(sys, "stderr", full)
        assert cli.main(["train", config]) == code
        monkeypatch.undo()


def test_torchrun_gets_the_message_of_a_rank_as_its_root_cause(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    assert cli.main(["config", config, "batch.groups=0"]) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    shown = str(ChildFailedError("learner", {0: ProcessFailure(0, 4711, 2, str(file))}))
    assert f"traceback : {message}" in shown


def test_a_bug_keeps_its_traceback(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(arguments: cli.Arguments) -> int:
        raise ZeroDivisionError

    monkeypatch.setitem(cli.COMMANDS, "train", cli.Command(fail, "", "", ""))
    with pytest.raises(ZeroDivisionError):
        cli.main(["train", config])


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main([command, "--help"])
    assert stopped.value.code == 0
    assert "example:" in capsys.readouterr().out


def test_help_and_config_load_neither_torch_nor_transformers(config: str) -> None:
    code = (
        "import json, sys; from asyncrl.cli import main; main(['config', sys.argv[1], '--rules-only']); "
        "print(json.dumps(sorted({'torch', 'transformers', 'zmq', 'rich'} & sys.modules.keys())))"
    )
    done = subprocess.run([sys.executable, "-c", code, config], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian", "x.yaml"], "there is no command trian; did you mean train?\n"),
        (["train"], "the following arguments are required: CONFIG\n"),
    ],
)
def test_mistakes_on_the_command_line_are_named(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.parse_words(words)
    assert f": error: {message}" in capsys.readouterr().err
