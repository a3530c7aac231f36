"""Folders with tasks of Harbor (task.toml, instruction.md, tests/), in a sandbox of this machine, not in a container.

tasks:
  source: asyncrl.environments.adapters.harbor:tasks
  options: {folders: "my_tasks/*"}
agent:
  environment: asyncrl.environments.adapters.harbor:Harbor
reward: {function: "asyncrl.generator.agents.env:of_the_environment"}

turn ── bash(command) ──▸ the sandbox ── what it prints ──▸ next turn
a turn without a call, or a limit ──▸ tests/test.sh in the same sandbox ──▸ /logs/verifier/reward.json or reward.txt
"""

from __future__ import annotations

import asyncio
import glob
import json
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from asyncrl.config.rules import require
from asyncrl.environments.adapters.shell import Shell
from asyncrl.environments.turns import ScoredTools
from asyncrl.errors import ConfigError
from asyncrl.generator.agents.chat import Message
from asyncrl.generator.agents.env import Reward
from asyncrl.rewards.sandbox import SandboxError
from asyncrl.types import Task

NETWORK = ("network_mode", "allowed_hosts")
SYSTEM_KEYS = ("docker_image", "os", "gpus", "gpu_types", "tpu", "mcp_servers", "skills_dir", "healthcheck")
UNSUPPORTED = {
    "environment": (*NETWORK, *SYSTEM_KEYS, "allow_internet"),
    "verifier": (*NETWORK, "user", "environment_mode", "environment", "collect"),
    "agent": (*NETWORK, "user"),
}
"""Keys of task.toml by table."""
HARMLESS: tuple[Any, ...] = (None, False, 0, [], "linux", "shared", "no-network")
"""Values of these keys that the sandbox fulfils anyway."""
COMPOSE = "environment/docker-compose."
OTHER_FILES = ("steps", "trajectory.json", f"{COMPOSE}yaml", f"{COMPOSE}yml")
SYSTEM = ("usr", "bin", "sbin", "lib", "lib64", "proc", "dev", "out", "tests", "etc", "")
"""Folders below / that no task may fill."""


@dataclass(slots=True)
class TaskFolder:
    """A task. place: the folder in which commands start · copies: (source, place)"""

    path: Path
    instruction: str
    place: str = "/app"
    copies: list[tuple[Path, str]] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    verifier_environment: dict[str, str] = field(default_factory=dict)
    verifier_s: float = 600.0


def tasks(folders: str | Sequence[str]) -> Sequence[Mapping[str, Any]]:
    """Rows of task folders, a `tasks.source`. Raises ConfigError for a folder that needs what is not supported.

    Args:
        folders: A pattern such as 'my_tasks/*', or several.
    """
    patterns = [folders] if isinstance(folders, str) else folders
    found = [Path(path) for pattern in patterns for path in sorted(glob.glob(pattern)) if Path(path).is_dir()]
    require(bool(found), "options.folders", folders, "names no folder", "name folders with a task.toml")
    return [{"prompt": read_folder(path).instruction, "folder": str(path)} for path in found]


def read_folder(path: Path) -> TaskFolder:
    """Raises ConfigError for a folder that lacks a file, or needs something that this sandbox does not have."""
    for name in ("task.toml", "instruction.md", "tests/test.sh"):
        remedy = "name folders of Harbor tasks"
        require((path / name).is_file(), "options.folders", str(path), f"has no {name}", remedy)
    config = tomllib.loads((path / "task.toml").read_text())
    for table, keys in UNSUPPORTED.items():
        for key in keys:
            if config.get(table, {}).get(key) not in HARMLESS:
                raise _unsupported(path, f"{table}.{key} of task.toml")
    for name in OTHER_FILES:
        if (path / name).exists():
            raise _unsupported(path, name)
    settings, verifier = config.get("environment", {}), config.get("verifier", {})
    read = TaskFolder(path, (path / "instruction.md").read_text().strip())
    read.verifier_s = float(verifier.get("timeout_sec", read.verifier_s))
    read.verifier_environment = _texts(verifier.get("env", {}))
    if (file := path / "environment" / "Dockerfile").exists():
        _read_dockerfile(read, file)
    read.place = settings.get("workdir") or read.place
    read.environment |= _texts(settings.get("env", {}))
    for value in (*read.environment.values(), *read.verifier_environment.values()):
        if "${" in value:
            raise _unsupported(path, f"the variable {value} of this process")
    for place in (read.place, *(place for _, place in read.copies)):
        if not place.startswith("/") or _top(place) in SYSTEM:
            raise _unsupported(path, f"the place {place}")
    return read


class Harbor(ScoredTools):
    """One task. The task's row names its folder.

    deadline_s  of a command
    memory_mb   of each process
    folder_mb   of each folder that a command may write to, in memory
    chars       most characters of an answer
    role        of the answers
    """

    def __init__(
        self,
        deadline_s: float = 60.0,
        memory_mb: int = 2048,
        folder_mb: int = 256,
        chars: int = 8192,
        role: str = "tool",
    ) -> None:
        super().__init__([self.bash], role, deadline_s=deadline_s + 10.0, most_chars=chars)
        self._deadline_s, self._limits = deadline_s, (memory_mb, folder_mb, chars)
        self._shell: Shell | None = None

    async def reset(self, task: Task) -> Sequence[Message]:
        await self.close()
        self._folder = read = read_folder(Path(task.data["folder"]))
        tops = dict.fromkeys(_top(place) for place in (read.place, *(to for _, to in read.copies)))
        folders = [f"/{top}" for top in tops if top not in ("tmp", "root", "logs")]
        self._shell = Shell(folders, *self._limits)
        await self._shell.start()
        await self._shell.rule(f"mkdir -p -m 777 {shlex.quote(read.place)}")
        for source, place in read.copies:
            await self._shell.rule(f"mkdir -p -m 777 {shlex.quote(place)}")
            await self._shell.put(source, place)
            await self._shell.rule(f"chmod -R a+rwX {shlex.quote(place)}")
        return await super().reset(task)

    async def bash(self, command: str) -> str:
        """Run a command in a new bash and return what it prints.

        Args:
            command: the command; files and processes last, variables and the folder do not
        """
        assert self._shell is not None
        words = _assignments(self._folder.environment)
        status, text = await self._shell.run(command, self._folder.place, self._deadline_s, words)
        return text if status == 0 else f"{text}\n[status {status}]"

    @classmethod
    def check(cls, *_: Any, **options: Any) -> None:
        """Start a shell."""

        async def start() -> None:
            shell = Shell([], 2048, 1, 1)
            try:
                await shell.start()
            finally:
                await shell.close()

        try:
            with ThreadPoolExecutor(1) as thread:  # an event loop may run in this one
                thread.submit(asyncio.run, start()).result()
        except SandboxError as error:
            rule = f"has no sandbox on this machine: {error}"
            remedy = "install bubblewrap, see docs/security.md"
            raise ConfigError("agent.environment", cls.__name__, rule, remedy) from None

    async def at_limit(self) -> Reward:
        """Run the tests. Raises ValueError if they leave no reward."""
        assert self._shell is not None
        await self._shell.end_processes()
        await self._shell.put(self._folder.path / "tests", "/tests")
        await self._shell.rule("chmod 777 /logs/verifier; chmod -R a+rX /tests")
        task = self._folder
        words = _assignments(task.environment | task.verifier_environment)
        _, printed = await self._shell.run("bash /tests/test.sh", task.place, task.verifier_s, words)
        status, text = await self._shell.rule("cd /logs/verifier; cat reward.json || cat reward.txt")
        if status != 0:
            raise ValueError(f"{task.path}: tests/test.sh left no reward: {printed[-500:]}")
        try:
            return float(text)
        except ValueError:
            return {name: float(value) for name, value in json.loads(text).items()}

    async def close(self) -> None:
        if self._shell is not None:
            await self._shell.close()


def _read_dockerfile(read: TaskFolder, file: Path) -> None:
    """This system stands in for the image of FROM. Files that are copied come from environment/."""
    for line in file.read_text().splitlines():
        word, _, rest = line.strip().partition(" ")
        if not word or word.startswith("#") or word.upper() == "FROM":
            continue
        words = shlex.split(rest)
        if word.upper() == "WORKDIR" and len(words) == 1:
            read.place = words[0]
        elif word.upper() == "COPY" and len(words) == 2 and not rest.startswith(("--", "[")):
            source = (file.parent / words[0]).resolve()
            if not source.is_relative_to(file.parent.resolve()):
                raise _unsupported(
                    read.path, f"{line!r} of the Dockerfile, which names a file outside of its folder"
                )
            place = words[1] if words[1].startswith("/") else f"{read.place}/{words[1]}"
            if not source.exists() or (source.is_file() and not (place.endswith("/") or words[1] == ".")):
                raise _unsupported(read.path, f"{line!r} of the Dockerfile, which names or renames a file")
            read.copies.append((source, str(PurePosixPath(place))))
        elif word.upper() == "ENV" and all("=" in one for one in words):
            read.environment |= dict(one.split("=", 1) for one in words)
        else:
            raise _unsupported(read.path, f"{line!r} of the Dockerfile")


def _top(place: str) -> str:
    """The folder below / that holds a place."""
    return "".join(PurePosixPath(place).parts[1:2])


def _unsupported(path: Path, what: str) -> ConfigError:
    remedy = "leave the task out, or play it with verifiers' taskset harbor, which has containers"
    return ConfigError("options.folders", str(path), f"needs {what}, which is not supported here", remedy)


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in values.items()}


def _assignments(environment: Mapping[str, str]) -> str:
    return " ".join(shlex.quote(f"{name}={value}") for name, value in environment.items())
