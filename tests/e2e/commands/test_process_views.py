"""Processes started by hand on a terminal show themselves, name their waits, and end on Ctrl-C as --help has it."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path

import pytest
from processes import FOR_EVER, queue_address, rows, until
from terminal import CTRL_C, Terminal, in_terminal

pytestmark = pytest.mark.slow


def terminal(*words: str) -> AbstractContextManager[Terminal]:
    return in_terminal(*words, "launch.quiet=false")


@pytest.mark.timeout(400)
def test_a_run_by_hand_on_three_terminals(config_file: Path) -> None:
    run, config = config_file.parent / "it", str(config_file)
    with ExitStack() as stack:
        queue = stack.enter_context(terminal("queue", config))
        queue.shows("queue of run it", "waiting for the learner")
        address = queue_address(run, queue.process)
        generator = stack.enter_context(terminal("generator", config, address, "--name", "g"))
        generator.shows("asyncrl generator: loading torch and the model", "g of run it: up", "none yet")
        generator.shows("waiting for the learner's weights")
        words = (FOR_EVER, "queue.deadline_s=10")
        learner = stack.enter_context(terminal("learner", config, address, *words))
        learner.shows("asyncrl learner: loading torch and the model", "learner of run it: version")
        learner.shows("reward", "staleness, mean", "gradient norm")
        generator.shows("weights of version", "groups made", "busy")
        queue.shows("groups trained", "groups ready", "generators and pools")

        generator.press(CTRL_C)
        assert generator.ends() == 130, generator.screen[-3000:]
        assert re.search(r"g: leases returned to the queue: \d+", generator.screen)
        assert generator.screen.endswith("asyncrl generator: interrupted\r\n")
        learner.shows("from the generators (")

        queue.process.kill()
        learner.shows(f"waiting for the queue at {address.partition('=')[2]}", "gives up at")
        assert learner.ends() == 4
        assert "learner rank 0 waited" in learner.screen
    assert rows(run)


@pytest.mark.timeout(300)
def test_a_learner_saves_on_ctrl_c(config_file: Path) -> None:
    run, config = config_file.parent / "it", str(config_file)
    with ExitStack() as stack:
        queue = stack.enter_context(terminal("queue", config))
        address = queue_address(run, queue.process)
        stack.enter_context(terminal("generator", config, address, "--name", "g"))
        learner = stack.enter_context(
            terminal("learner", config, address, FOR_EVER, "checkpoint.every=100000")
        )
        until(lambda: rows(run), "a version", learner.process)
        learner.press(CTRL_C)
        assert learner.ends() == 130, learner.screen[-3000:]
        assert "stopping: the learner writes a checkpoint" in learner.screen
        assert list((run / "checkpoints").glob("v*"))
        assert "UserWarning" not in learner.screen
        with suppress(OSError):  # its terminal is gone
            queue.press(CTRL_C)
        assert queue.ends() in (0, 130)  # the learner has closed the run, so it may have ended by itself
