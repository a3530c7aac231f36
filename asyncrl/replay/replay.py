"""`asyncrl replay`: a run of many processes made again in this one, in the order of its decisions.

    RUN/decisions ─┬─▸ a ReplayedGenerator for each life of a generator ──┐ as far as the weights permit
                   └─▸ the ReplayedLearner ───────────────────────────────┴ as far as the groups permit
                              │
                              └─▸ the hash of each version's weights, beside the recorded one

Each party goes on until it needs something of another that is not made yet. Causes come before effects in the run, so
one of them can always go on; if none can, the run has diverged from its record.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import msgpack

from asyncrl.config.load import load_config
from asyncrl.config.rules import require
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError, DivergedError
from asyncrl.models.prompts import policy_tokenizer
from asyncrl.replay.replayed_generator import ReplayedGenerator
from asyncrl.replay.replayed_learner import Replayed, ReplayedLearner
from asyncrl.replay.stores import GroupStore, Published, WeightStore
from asyncrl.tasks.source import held_out, training_tasks
from asyncrl.telemetry.decisions import FOLDER, FORMAT, ClaimedGroup, Life, TrainedVersion, read_lives
from asyncrl.types import Version

LEARNERS = "algorithm.", "learner.", "reference.", "critic."
"""Sections with rules of the learner's step."""

BISECT = "compare runs by their decisions: asyncrl bisect RUN RUN"


async def replay(
    run_folder: Path, until: Version | None = None, keys: Sequence[str] = (), export: Path | None = None
) -> AsyncIterator[Replayed]:
    """Make the versions of a run again, up to `until` or the last one that is recorded.

    Args:
        keys: Words key=value by which a second learner trains on the same groups. Its policy made none of them.
        export: A folder for the last policy of that learner.

    Raises:
        ConfigError: The run has no decisions, or cannot be made again in one process, or not by these keys.
        DivergedError: It comes to something else than what is recorded. A difference of the weights alone is no error
            here: see `Replayed.same`.
    """
    lives = [(life, _configured(run_folder, life)) for life in recorded_lives(run_folder)]
    for _, config in lives:
        check(config)
    learners = [one for one in lives if one[0].role == "learner"]
    require(bool(learners), "RUN", str(run_folder), "has no decisions of its learner", "replay another run")
    check_keys(keys)
    otherwise = [_configured(run_folder, life, keys) for life, _ in learners] if keys else []
    groups = GroupStore(claim for life, _ in learners for claim in _claims(life))
    weights = WeightStore(flip for life, _ in lives for flip in _flips(life))
    generators = _Generators([one for one in lives if one[0].role == "generator"], groups, weights)
    with tempfile.TemporaryDirectory(prefix="asyncrl-replay-") as scratch:
        learner = ReplayedLearner(learners, Path(scratch), groups, weights, otherwise)
        try:
            async for made in _versions(learner, generators, groups):
                yield made
                if made.recorded.version == until and not made.recorded.refused:
                    break
            if export is not None:
                learner.export(export)
        finally:
            await generators.close()
            learner.close()


async def _versions(
    learner: ReplayedLearner, generators: _Generators, groups: GroupStore
) -> AsyncIterator[Replayed]:
    while not learner.ended:
        moved = False
        for made in learner.advance():
            yield made
            moved = True
        if not learner.ended and not await generators.advance() and not moved:
            raise _stuck(learner, generators, groups)


def recorded_lives(run_folder: Path) -> list[Life]:
    """Raises ConfigError for a run that has no decisions, or none in this format."""
    folder = run_folder / FOLDER
    try:
        lives = read_lives(folder)
    except (ValueError, TypeError, IndexError, msgpack.UnpackException) as error:
        rule = f"has a file in {folder} that no process wrote, or that was changed: {error}"
        raise ConfigError("RUN", str(run_folder), rule, "replay another run") from error
    if not lives:
        remedy = "give a run with telemetry.decisions=true, of this version of asyncrl or a later one"
        raise ConfigError("RUN", str(run_folder), f"has no decisions in {folder}", remedy)
    for life in lives:
        if (given := life.about.get("format")) != FORMAT:
            rule = f"{life.name} recorded its decisions in format {given}, this asyncrl reads {FORMAT}"
            raise ConfigError("RUN", str(run_folder), rule, "use the asyncrl that made it")
    return lives


def _configured(run_folder: Path, life: Life, keys: Sequence[str] = ()) -> Config:
    """The configuration of a life, changed by words key=value."""
    return load_config(run_folder / FOLDER / str(life.about["config"]), keys)


def check(config: Config) -> None:
    """Raises ConfigError for a run whose rollouts or steps are no function of its decisions in one process."""
    ours = config.generator.engine == "transformers" and config.generator.own_engine is None
    engine = config.generator.own_engine or config.generator.engine
    rule = "only the embedded engine makes the same tokens again: its batches are recorded"
    require(ours, "generator.engine", engine, rule, BISECT)
    rule = "a learner of several ranks sums in another order than one process"
    require(config.learner.processes == 1, "learner.processes", config.learner.processes, rule, BISECT)
    pools = [*config.placement.pools]
    require(
        not pools, "placement", pools, "pools decide in processes whose decisions are not recorded", BISECT
    )
    harness = config.agent.harness
    require(
        harness is None, "agent", harness, "a program of yours plays the rollouts, at its own pace", BISECT
    )


def check_keys(words: Sequence[str]) -> None:
    """Raises ConfigError for words key=value that change more than the learner's step."""
    for word in words:
        key, _, value = word.partition("=")
        rule = "the groups of the run stay as they are: only the rules of the learner's step can be others"
        require(
            key.startswith(LEARNERS), key, value, rule, f"give keys that begin with {', '.join(LEARNERS)}"
        )


class _Generators:
    """All generators, each with one of its lives loaded at a time."""

    def __init__(
        self, lives: Sequence[tuple[Life, Config]], groups: GroupStore, weights: WeightStore
    ) -> None:
        self._lives: dict[str, deque[tuple[Life, Config]]] = defaultdict(deque)
        for life, config in lives:
            self._lives[life.process].append((life, config))
        self._groups, self._weights = groups, weights
        self._loaded: dict[str, ReplayedGenerator] = {}

    async def advance(self) -> bool:
        """Let each go on as far as it can. Returns whether any did."""
        moved = [await self._advance(name) for name in [*self._lives]]
        for generator in self._loaded.values():
            await generator.settle()
        return any(moved)

    async def _advance(self, name: str) -> bool:
        """A life that has ended is left with its samples that were under way."""
        generator = self._loaded.get(name)
        if generator is None or generator.ended:
            if generator is not None:
                await generator.settle()
                await generator.close()
                del self._loaded[name]
            if not self._lives[name]:
                return False
            generator = self._loaded[name] = self._load(*self._lives[name].popleft())
            await generator.advance()
            return True
        return await generator.advance()

    def _load(self, life: Life, config: Config) -> ReplayedGenerator:
        tokenizer, tasks = policy_tokenizer(config), training_tasks(config)
        return ReplayedGenerator(
            life, config, tokenizer, tasks, held_out(config), self._groups, self._weights
        )

    def waits(self) -> list[str]:
        """For errors."""
        return [one.waits_for for one in self._loaded.values() if not one.ended]

    async def close(self) -> None:
        for generator in self._loaded.values():
            await generator.close()


def _claims(life: Life) -> Iterator[ClaimedGroup]:
    for item in life.items:
        if item[0] == "trained":
            for claim in TrainedVersion.from_wire(item).claims:
                yield from claim


def _flips(life: Life) -> Iterator[Published]:
    """The versions that were flipped to, in their order."""
    named = Published(0, 0)
    for kind, *values in life.items:
        if kind == "weights":
            named = Published(*values)
        elif kind == "flip":
            yield named


def _stuck(learner: ReplayedLearner, generators: _Generators, groups: GroupStore) -> DivergedError:
    lacks = learner.lacks
    assert lacks is not None
    made = groups.others(lacks.ordinal)
    found = f"{made} other groups of it were made" if made else "no group of it was made"
    waits = "; ".join(generators.waits()) or "the generators have made all that they had recorded"
    return DivergedError(f"the learner needs the recorded group of task {lacks.ordinal}; {found}; {waits}")
