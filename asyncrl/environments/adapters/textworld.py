"""Text games that TextWorld plays: its own (.z8, .ulx), on which ALFWorld is built, and other interactive fiction.

    agent:
      environment: asyncrl.environments.adapters.textworld:TextWorld
      options: {game: games/first.z8, admissible: true}

A task names its game in the field `game`; the option is the game of tasks without that field.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asyncrl.config.rules import require
from asyncrl.environments.adapters import imported
from asyncrl.environments.turns import answer, opening
from asyncrl.generator.agents.chat import Message
from asyncrl.generator.agents.env import Action, Environment, Observation
from asyncrl.types import Task

STATUS = re.compile(r"\n>[^\n]*\Z")
"""The prompt of the game's interpreter, which has place, score and moves behind it."""


class TextWorld(Environment):
    """A turn is a command, and its reward is what it adds to the game's score. Two turns begin in equal states if the
    descriptions of place and inventory are equal.

    game        file of a game
    admissible  show the commands that the game accepts
    marker      a text: the command is what follows the last of it in a turn; none: the whole turn
    """

    def __init__(self, game: str | None = None, admissible: bool = False, marker: str | None = None) -> None:
        super().__init__()
        self._game, self._admissible, self._marker = game, admissible, marker
        self._played: Any = None

    @classmethod
    def check(cls, game: str | None = None, admissible: bool = False, marker: str | None = None) -> None:
        imported("textworld", "textworld")
        remedy = "make one: tw-make simple --rewards dense --goal detailed --output games/first.z8"
        require(game is None or Path(game).is_file(), "game", game, "is no file", remedy)
        require(marker != "", "marker", marker, "is empty", "leave it out: a turn is then the command")

    async def reset(self, task: Task) -> Sequence[Message]:
        textworld = imported("textworld", "textworld")
        await self.close()
        wanted = dict.fromkeys(("feedback", "description", "inventory", "score"), True)
        wanted["admissible_commands"] = self._admissible
        self._played = textworld.start(str(task.data.get("game", self._game)), textworld.EnvInfos(**wanted))
        state = self._played.reset()
        self._score = float(state.score or 0)
        return opening(task, self._shown(state))

    async def step(self, action: Action) -> Observation:
        text = action.text.strip()
        command = text if self._marker is None else text.rpartition(self._marker)[2].strip()
        state, score, done = self._played.step(" ".join(command.split()))
        gained, self._score = float(score) - self._score, float(score)
        place = f"{state.description}\n{state.inventory}"
        return answer(self._shown(state), gained, bool(done), place)

    async def close(self) -> None:
        if self._played is not None:
            self._played.close()

    def _shown(self, state: Any) -> str:
        text = STATUS.sub("", str(state.feedback)).strip()
        if not self._admissible:
            return text
        return f"{text}\n\nCommands: {', '.join(state.admissible_commands)}"
