"""`asyncrl train` with the dashboard beside it: the address is printed, the page answers, and the run outlives it."""

from __future__ import annotations

import json
import os
import re
import signal
import urllib.request
from pathlib import Path

from processes import FOR_EVER, child, finished, started


def state(address: str) -> dict[str, object]:
    with urllib.request.urlopen(f"{address}api/state", timeout=30) as answer:
        return dict(json.load(answer))


def test_a_run_serves_its_page_and_goes_on_when_that_is_killed(config_file: Path) -> None:
    words = ("launch.dash=true", "launch.stop_deadline_s=200", FOR_EVER)
    with started("asyncrl", "train", str(config_file), *words) as launcher:
        assert launcher.stdout is not None
        seen = ""
        while (found := re.search(r"dashboard: (http://127\.0\.0\.1:\d+/)\n", seen)) is None:
            line = launcher.stdout.readline()
            assert line, seen
            seen += line
        assert state(found[1])["name"] == "it"
        child(launcher, "dash").kill()
        while "the dashboard ended" not in seen:
            line = launcher.stdout.readline()
            assert line, seen
            seen += line
        assert child(launcher, "learner").is_running()
        os.kill(launcher.pid, signal.SIGTERM)
        code, printed = finished(launcher)
    assert code == 10, printed  # stopped, and nothing else


def test_the_command_serves_until_it_is_stopped(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    with started("asyncrl", "dash", str(tmp_path), "--port", "0") as server:
        assert server.stdout is not None
        address = server.stdout.readline().partition(": ")[2].strip()
        assert state(address)["name"] == tmp_path.name
        os.kill(server.pid, signal.SIGTERM)
        assert finished(server)[0] == 0
