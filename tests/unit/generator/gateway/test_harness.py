"""Programs and functions that play rollouts: what they are given, what they give, and how they end."""

from __future__ import annotations

import asyncio
import resource
import shlex
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from agent_cases import SAMPLING, TASK, Speaker
from chat_cases import tokenizer
from gateway_cases import harness, played, speaker
from processes import runs, until

from asyncrl.config.schema import Config, ModelConfig
from asyncrl.config.sections.agent import AgentConfig, GatewayConfig
from asyncrl.errors import ConfigError
from asyncrl.generator.agents.agent import EnvironmentFailedError
from asyncrl.generator.gateway import harness as harness_module
from asyncrl.generator.gateway.harness import check_player
from asyncrl.types import Task

ASKING = """
import json, os, sys, urllib.request
def ask(text, key=os.environ["OPENAI_API_KEY"]):
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode()
    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]
"""


def program(folder: Path, lines: str) -> str:
    """The command of a program that may `ask`."""
    (folder / "program.py").write_text(ASKING + lines)
    return shlex.join([sys.executable, "-S", str(folder / "program.py"), str(folder)])


async def test_a_program_has_its_task_and_gives_its_reward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASYNCRL_SECRET", "secret")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    lines = """
task = json.loads(os.environ["ASYNCRL_TASK"])
assert task == json.load(sys.stdin), "the same"
assert "ASYNCRL_SECRET" not in os.environ
assert os.environ["ANTHROPIC_API_KEY"] == os.environ["OPENAI_API_KEY"]
print("{no JSON")
said = ask(task["prompt"])
print(json.dumps({"reward": {"right": float(said == task["data"]["answer"]), "short": 0.5}}))
"""
    made = harness(speaker("408"), program=program(tmp_path, lines))
    rollout = (await played(made)).rollout({"right": 3.0})
    assert (rollout.reward, rollout.reward_parts) == (3.5, {"right": 1.0, "short": 0.5})


async def test_a_long_task_is_in_the_input_alone(tmp_path: Path) -> None:
    lines = """
assert "ASYNCRL_TASK" not in os.environ
ask(str(len(json.load(sys.stdin)["data"]["text"])))
"""
    talker = speaker("fine")
    made = harness(talker, program=program(tmp_path, lines))
    record = await made.play(Task(3, "p", {"text": "x" * 200_000}), "r", SAMPLING)
    assert "200000" in talker.tok.decode(talker.asked[0].prompt_ids)
    assert record.rollout({}).reward_parts == {}  # it gave none
    await made.close()


FAULTS = {
    "exit code 3: it is <its key>$": """
ask("hi")
print("it is", os.environ["OPENAI_API_KEY"], file=sys.stderr)
sys.exit(3)
""",
    "has made no request": "",
    "exit code 1: .*401": "ask('hi', 'another.key')",
    "finite": "ask('hi')\nprint('{\"reward\": NaN}')",
}


@pytest.mark.parametrize(("why", "lines"), FAULTS.items(), ids=[*FAULTS])
async def test_a_program_that_fails_is_the_reason_of_a_drop(tmp_path: Path, why: str, lines: str) -> None:
    made = harness(Speaker(lambda so_far: "a"), program=program(tmp_path, lines))
    with pytest.raises(EnvironmentFailedError, match=f"(?s){why}") as caught:
        await played(made)
    assert made._gateway._sessions == {}
    assert len(str(caught.value)) < 1000


CRASHES = """
first = ask(json.loads(os.environ["ASYNCRL_TASK"])["prompt"])
with open(sys.argv[1] + "/starts", "a") as file:
    file.write("x")
if os.path.getsize(sys.argv[1] + "/starts") <= {crashes}:
    os.abort()
ask(first)
"""


async def test_a_program_that_crashes_once_begins_anew_from_its_turns(tmp_path: Path) -> None:
    talker = speaker("one", "two")
    made = harness(talker, program=program(tmp_path, CRASHES.format(crashes=1)))
    record = await played(made)
    assert (record.segments(), len(talker.asked), (tmp_path / "starts").read_text()) == ([[0], [1]], 2, "xx")
    names = ("rollouts", "environment_retries", "given_again", "resumed")
    assert [made.stats()[f"agent/{name}"] for name in names] == [1, 1, 1, 1]
    (tmp_path / "starts").unlink()
    made = harness(
        speaker("one"), program=program(tmp_path, CRASHES.format(crashes=9)), environment_retries=2
    )
    with pytest.raises(EnvironmentFailedError, match="exit code -6"):
        await played(made)
    assert ((tmp_path / "starts").read_text(), made.stats()["agent/environment_retries"]) == ("xxx", 2)


async def test_a_program_that_makes_no_request_is_late() -> None:
    made = harness(speaker(), program="sleep 1000", deadline_s=0.05)
    with pytest.raises(EnvironmentFailedError, match="its next request, or its end"):
        await played(made)
    assert made.stats()["agent/environment_late"] == 2


async def test_a_program_ends_with_all_that_it_has_started(tmp_path: Path) -> None:
    lines = """
import subprocess
other = subprocess.Popen(["sleep", "1000"], start_new_session=True, env={})
with open(sys.argv[1] + "/written", "w") as file:
    file.write(f"{os.getpid()} {other.pid}")
os.rename(sys.argv[1] + "/written", sys.argv[1] + "/pids")
other.wait()
"""
    playing = asyncio.create_task(played(harness(speaker(), program=program(tmp_path, lines))))
    while not (tmp_path / "pids").exists():
        await asyncio.sleep(0.01)
    playing.cancel()
    await asyncio.wait({playing})
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2
    until(lambda: not any(map(runs, pids)), "end of the program")


async def test_what_a_program_has_left_behind_ends_with_it(tmp_path: Path) -> None:
    lines = """
import subprocess
ask("hi")
if os.fork() == 0:
    os.setsid()
    closed = dict.fromkeys(["stdin", "stdout", "stderr"], subprocess.DEVNULL)
    with open(sys.argv[1] + "/pid", "w") as file:
        file.write(str(subprocess.Popen(["sleep", "100"], **closed).pid))
    os._exit(0)
os.wait()
"""
    await played(harness(speaker("a"), program=program(tmp_path, lines)))
    pid = int((tmp_path / "pid").read_text())
    until(lambda: not runs(pid), "end of the daemon")


async def test_one_search_serves_all_programs_that_ended_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first search finds one program; the three that end meanwhile share the second."""
    searches: list[list[str]] = []
    begun, going_on = threading.Event(), threading.Event()

    def search(ended: dict[str, int | None]) -> None:
        searches.append([*ended])
        begun.set()
        assert going_on.wait(60)

    monkeypatch.setattr(harness_module, "_kill_started", search)
    leftovers = harness_module.Leftovers()
    calls = [asyncio.create_task(leftovers.kill(None, "a"))]
    await asyncio.to_thread(begun.wait, 60)
    calls += [asyncio.create_task(leftovers.kill(None, mark)) for mark in "bcd"]
    await asyncio.sleep(0)
    going_on.set()
    await asyncio.wait_for(asyncio.gather(*calls), 60)
    assert searches == [["a"], ["b", "c", "d"]]


async def test_a_function_that_blocks_its_loop_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness_module, "CLOSE_S", 0.05)
    going_on = threading.Event()
    threads: list[int] = []

    async def run(url: str, key: str, task: Task) -> float:
        threads.append(threading.get_ident())
        if len(threads) == 1:
            going_on.wait()
        await asyncio.sleep(0)
        raise SystemExit("over")

    made = harness(speaker("a"), run, deadline_s=0.1, environment_retries=0)
    with pytest.raises(EnvironmentFailedError, match=r"agent\.deadline_s"):
        await made.play(TASK, "r", SAMPLING)
    with pytest.raises(EnvironmentFailedError, match="over"):
        await made.play(TASK, "r", SAMPLING)
    going_on.set()
    assert len({*threads, threading.get_ident()}) == 3
    await made.close()


async def test_many_programs_may_have_their_files_and_connections() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1024), hard))
    try:
        made = harness(speaker(), program="true")
        with pytest.raises(EnvironmentFailedError, match="has made no request"):
            await played(made)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= min(soft, 1 << 16)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_an_address_that_is_taken_is_an_error_of_its_key() -> None:
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    made = harness(speaker("a"), program="true", gateway=GatewayConfig(port=port))
    async with server:
        with pytest.raises(ConfigError, match=rf"agent.gateway = '127.0.0.1:{port}': cannot be listened on"):
            await played(made)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"program": "no-such-program -x"}, "there is no program 'no-such-program'"),
    ({"function": "gateway_cases:played"}, "agent.function"),
    ({"function": "gateway_cases:missing"}, "agent.function"),
]


@pytest.mark.parametrize(("chosen", "why"), REFUSED)
def test_what_cannot_be_started_is_known_before_the_run(chosen: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        check_player(
            tokenizer("merges"), Config(model=ModelConfig(path="unused"), agent=AgentConfig(**chosen))
        )
