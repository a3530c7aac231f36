"""Sokoban: push every box onto a target. Boards are generated, each with a shortest solution.

    ######     # wall    _ floor    . target    $ box    @ player
    #_.$@#     * a box on a target  + the player on a target
    #____#
    ######     a turn is one of up, down, left, right, alone or as <action>left</action>

Boards are made backwards: from all positions in which the boxes stand on the targets, moves are taken back, nearest
first. So each position comes with the fewest moves that solve it.

Rewards are those of gym-sokoban, which verl-agent, RAGEN and VAGEN use too: −0.1 for each turn, 1 for a box that comes
onto a target, −1 for one that leaves it, 10 for the solved board.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

from asyncrl.config.rules import require
from asyncrl.environments.turns import action_in, opening
from asyncrl.errors import ConfigError, TaskError
from asyncrl.generator.agents.chat import Message
from asyncrl.generator.agents.env import Action, Environment, Observation
from asyncrl.tasks.generated import GeneratedRow, GeneratedRows
from asyncrl.types import Task

INSTRUCTION = """\
You play Sokoban. Push every box onto a target: walk into a box to push it, if nothing is behind it. You cannot pull.
Symbols: # wall, _ floor, . target, $ box, * box on a target, @ you, + you on a target.
Answer with one move at a time: <action>up</action>, <action>down</action>, <action>left</action> or
<action>right</action>.
The board:"""

TURN_REWARD, BOX_REWARD, SOLVED_REWARD = -0.1, 1.0, 10.0

FREE, BOX, PLAYER = "_.", "$*", "@+"
"""Symbols of a cell that is empty, has a box, or the player; each without and with a target."""

MOST_POSITIONS = 20_000
"""Most positions that are searched for one board. Because of it, solutions of large boards with many boxes are
shorter."""

MOST_ROOMS = 200

TILE = 16
"""Pixels of a cell's side in a picture."""
COLOURS = dict(
    zip("#_.$*@+", ("#555", "#eee", "#f2b6b6", "#b5793a", "#4c9a4c", "#3a62b5", "#8a3ab5"), strict=True)
)


MOVES = ("up", "down", "left", "right")
STAY = "stay"
"""gym-sokoban's "no operation"."""


def steps(board: str) -> dict[str, int]:
    """The distance that each move goes in the board's text."""
    width = board.index("\n") + 1
    return dict(zip(MOVES, (-width, width, -1, 1), strict=True))


def moved(board: str, move: str) -> str:
    """The board after a move; the same one where a wall or a second box is in the way.

    >>> moved("######\\n#_.$@#\\n######", "left")
    '######\\n#_*@_#\\n######'
    """
    at, step = _player(board), steps(board)[move]
    to, beyond = at + step, at + 2 * step
    if board[to] in FREE:
        return _carried(board, PLAYER, at, to)
    if board[to] in BOX and board[beyond] in FREE:
        return _carried(_carried(board, BOX, to, beyond), PLAYER, at, to)
    return board


def taken_back(board: str) -> Iterator[tuple[str, str]]:
    """The moves that lead to a board, each with the board before it."""
    at = _player(board)
    for move, step in steps(board).items():
        if board[at - step] in FREE:
            before = _carried(board, PLAYER, at, at - step)
            yield move, before
            if board[at + step] in BOX:
                yield move, _carried(before, BOX, at + step, at)


def generated(draw: Random, size: int, boxes: int, moves: int, walls: int) -> tuple[str, list[str]]:
    """A board, and a shortest solution of 1 to `moves` moves. walls: inside of the room.

    Raises TaskError where the room hardly ever lets a box move.
    """
    inside = [row * (size + 1) + column for row in range(1, size - 1) for column in range(1, size - 1)]
    for _ in range(MOST_ROOMS):
        floor = draw.sample(inside, len(inside) - walls)
        room = list("\n".join(["#" * size] * size))
        for place, cell in enumerate(floor):
            room[cell] = "*" if place < boxes else "_"
        levels, solution = _backwards("".join(room), sorted(floor[boxes:]), moves)
        if len(levels) > 1:
            board = at = draw.choice(draw.choice(levels[1:]))
            found = []
            while at in solution:
                move, at = solution[at]
                found.append(move)
            return board, found
    raise TaskError(f"{boxes} boxes cannot be moved in a room of {size} × {size} with {walls} walls inside")


def with_stays(draw: Random, solution: Sequence[str], share: float, most: int) -> list[str]:
    """The solution with turns that stay. Only the first `most` turns may be such."""
    turns: list[str] = []
    for move in solution:
        while len(turns) < most and draw.random() < share:
            turns.append(STAY)
        turns.append(move)
    return turns


def _backwards(
    solved: str, floor: Sequence[int], most: int
) -> tuple[list[list[str]], dict[str, tuple[str, str]]]:
    """(levels, solution): levels[n] are the boards that n moves solve and fewer do not, up to `most`; solution maps a
    board to its next move and the board after that.

    solved: without a player · floor: where the player may stand there
    """
    levels = [[f"{solved[:cell]}@{solved[cell + 1 :]}" for cell in floor]]
    done, solution = set(levels[0]), dict[str, tuple[str, str]]()
    while levels[-1] and len(levels) <= most and len(solution) < MOST_POSITIONS:
        levels.append([])
        for board in levels[-2]:
            for move, earlier in taken_back(board):
                if earlier not in done:
                    done.add(earlier)
                    solution[earlier] = move, board
                    levels[-1].append(earlier)
    return [level for level in levels if level], solution


def tasks(
    size: int = 6,
    boxes: int = 1,
    moves: int = 10,
    walls: int = 0,
    stays: float = 0.0,
    count: int = 100_000,
    seed: int = 0,
    held_out: bool = False,
    prompt: str = INSTRUCTION,
) -> GeneratedRows:
    """Rows {prompt, board, target}: a board of size × size cells, and the moves that solve it.

    Args:
        size: cells of a side, with the walls around.
        boxes: of a board.
        moves: of the longest solution; the lengths from 1 on are equally frequent.
        walls: cells inside of the room that are walls.
        stays: the share of a demonstration's first `moves` turns that stay; it has up to twice as many turns then.
        count: rows of an epoch.
        seed: other numbers give other boards.
        held_out: boards that no training task has.
        prompt: the text before the first board.
    """
    room = max(size - 2, 0) ** 2 - max(walls, 0)
    require(boxes > 0, "options.boxes", boxes, "is no number of boxes", "set boxes=1")
    require(
        room > 2 * boxes, "options.size", size, f"leaves {room} cells for {boxes} boxes", "set size=6 walls=0"
    )
    require(moves > 0, "options.moves", moves, "is no number of moves", "set moves=10")

    def row(draw: Random) -> GeneratedRow:
        board, solution = generated(draw, size, boxes, moves, walls)
        return {"prompt": prompt, "board": board, "target": with_stays(draw, solution, stays, moves)}

    return GeneratedRows(row, count, seed, held_out)


class Sokoban(Environment):
    """Plays the board of `task.data["board"]`. The state of a turn is the board.

    Args:
        observation: "text" shows boards as above, "image" as pictures of `TILE` pixels a cell.
        composed: each turn reads the task's prompt with its own board, and no earlier turn.
    """

    def __init__(self, observation: str = "text", composed: bool = False) -> None:
        super().__init__()
        self.check(observation)
        self._shown, self._composed = board_picture if observation == "image" else str, composed

    @classmethod
    def check(cls, observation: str = "text", composed: bool = False) -> None:
        known = observation in ("text", "image")
        require(known, "observation", observation, "is neither text nor image", "set observation=text")

    async def reset(self, task: Task) -> Sequence[Message]:
        self._task, self._board = task, str(task.data["board"])
        if problem := problem_of(self._board):
            raise ValueError(f"task.data['board'] {problem}")
        return opening(task, self._shown(self._board))

    async def step(self, action: Action) -> Observation:
        move, before = action_in(action.text).lower(), self._board
        if move in steps(before):
            self._board = moved(before, move)
        elif move != STAY:
            self.counts["malformed"] += 1
        reward = {"turn": TURN_REWARD, "box": BOX_REWARD * (self._board.count("*") - before.count("*"))}
        if "$" not in self._board:
            return Observation(reward={**reward, "solved": SOLVED_REWARD}, done=True)
        shown = self._shown(self._board)
        if self._composed:
            return Observation(prompt=opening(self._task, shown), reward=reward, state=self._board)
        return Observation([{"role": "user", "content": shown}], reward, state=self._board)


def problem_of(board: str) -> str | None:
    """Why a text is no board, or None."""
    lines = board.split("\n")
    edge = {*lines[0], *lines[-1], *(line[:1] for line in lines), *(line[-1:] for line in lines)}
    if edge != {"#"} or len({len(line) for line in lines}) > 1 or not {*board} <= {*COLOURS, "\n"}:
        return "is no rectangle of the symbols " + " ".join(COLOURS) + " with walls around"
    if sum(map(board.count, PLAYER)) != 1 or not 0 < board.count("$") == board.count(".") + board.count("+"):
        return "has not one player, and a free target for each box that stands on none"
    return None


def board_picture(board: str) -> list[dict[str, Any]]:
    """A board as the content of a message, an image of the package pillow."""
    try:
        from PIL import Image, ImageDraw
    except ImportError:
        rule = "needs the package pillow, which is not installed"
        raise ConfigError("observation", "image", rule, "pip install pillow") from None
    lines = board.split("\n")
    image = Image.new("RGB", (TILE * len(lines[0]), TILE * len(lines)))
    draw = ImageDraw.Draw(image)
    for row, line in enumerate(lines):
        for column, symbol in enumerate(line):
            corner = TILE * column, TILE * row
            draw.rectangle((*corner, corner[0] + TILE - 1, corner[1] + TILE - 1), COLOURS[symbol])
    return [{"type": "image", "image": image}]


def _player(board: str) -> int:
    return max(map(board.find, PLAYER))


def _carried(board: str, kind: str, start: int, to: int) -> str:
    """The board with the box or player at `start` on the free cell `to`."""
    cells = list(board)
    cells[start], cells[to] = FREE[kind.index(board[start])], kind[FREE.index(board[to])]
    return "".join(cells)
