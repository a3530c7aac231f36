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
from asyncrl.config.sections.generator import key_of_pool
from asyncrl.errors import ConfigError, DivergedError
from asyncrl.learner.reporting.saved_groups import folder_of, load_groups
from asyncrl.learner.training import requirements
from asyncrl.models.prompts import policy_tokenizer
from asyncrl.replay.replayed_generator import ReplayedGenerator
from asyncrl.replay.replayed_learner import Replayed, ReplayedLearner
from asyncrl.replay.stores import GroupStore, Published, WeightStore
from asyncrl.tasks.curriculum import CurriculumStream
from asyncrl.tasks.source import held_out, tasks_of_run
from asyncrl.telemetry.decisions import FOLDER, FORMAT, ClaimedGroup, Life, TrainedVersion, read_lives
from asyncrl.types import Version

LEARNERS = "algorithm.", "learner.", "reference.", "critic."
"""Sections with rules of the learner's step."""

BISECT = "compare runs by their decisions: asyncrl bisect RUN RUN"
SAVED = (
    f"make the learner's part again with --saved-groups, of a run with telemetry.groups_every=1; or {BISECT}"
)


async def replay(
    run_folder: Path,
    until: Version | None = None,
    keys: Sequence[str] = (),
    export: Path | None = None,
    saved: bool = False,
) -> AsyncIterator[Replayed]:
    """Make the versions of a run again, up to `until` or the last one that is recorded.

    Args:
        keys: Words key=value by which a second learner trains on the same groups. Its policy made none of them.
        export: A folder for the last policy of that learner.
        saved: Take the groups from the run's files (`telemetry.groups_every`), whoever made them, and make only the
            learner's part again.

    Raises:
        ConfigError: The run has no decisions, or cannot be made again in one process, or not by these keys.
        DivergedError: It comes to something else than what is recorded. A difference of the weights alone is no error
            here: see `Replayed.same`.
    """
    lives = [(life, _configured(run_folder, life)) for life in recorded_lives(run_folder)]
    for _, config in lives:
        check_learner(config)
        if not saved:
            check_rollouts(config)
    learners = [one for one in lives if one[0].role == "learner"]
    require(bool(learners), "RUN", str(run_folder), "has no decisions of its learner", "replay another run")
    check_keys(keys)
    otherwise = [_configured(run_folder, life, keys) for life, _ in learners] if keys else []
    groups = GroupStore(claim for life, _ in learners for claim in _claims(life))
    makers = [] if saved else [one for one in lives if one[0].role == "generator"]
    weights = WeightStore(flip for life, _ in makers for flip in _flips(life))
    with tempfile.TemporaryDirectory(prefix="asyncrl-replay-") as scratch:
        learner = ReplayedLearner(learners, Path(scratch), groups, weights, otherwise)
        generators = (
            _Saved(run_folder, learner, groups) if saved else _Generators(run_folder, makers, groups, weights)
        )
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
    learner: ReplayedLearner, generators: _Generators | _Saved, groups: GroupStore
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


def check_learner(config: Config) -> None:
    """Raises ConfigError for a run whose learner's steps one process cannot make."""
    rule = "a learner of several ranks sums in another order than one process"
    require(config.learner.processes == 1, "learner.processes", config.learner.processes, rule, BISECT)
    taught = requirements.models_trained_in_pools(config)
    rule = "models that learn in pools keep no record of their decisions"
    require(not taught, "placement", [*taught], rule, BISECT)


def check_rollouts(config: Config) -> None:
    """Raises ConfigError for a run whose rollouts are no function of its decisions."""
    harness, pools = config.agent.harness, [*config.placement.pools]
    rule = "only the embedded engine makes the same tokens again: its batches are recorded"
    for name, generator in config.generator_pools.items():
        require(generator.embedded, f"{key_of_pool(name)}.engine", generator.engine_in_use, rule, SAVED)
    require(not pools, "placement", pools, "pools keep no record of their decisions", SAVED)
    require(
        harness is None, "agent", harness, "a program of yours plays the rollouts, at its own pace", SAVED
    )


def check_keys(words: Sequence[str]) -> None:
    """Raises ConfigError for words key=value that change more than the learner's step."""
    for word in words:
        key, _, value = word.partition("=")
        rule = "the groups of the run stay as they are: only the rules of the learner's step can be others"
        require(
            key.startswith(LEARNERS), key, value, rule, f"give keys that begin with {', '.join(LEARNERS)}"
        )


class _Saved:
    """The groups that the run has written, in place of generators."""

    def __init__(self, run_folder: Path, learner: ReplayedLearner, groups: GroupStore) -> None:
        self._run_folder, self._learner, self._groups = run_folder, learner, groups
        self._read: set[Version] = set()

    async def advance(self) -> bool:
        """Read the groups of the next version. Returns False if they are read already, or not there."""
        version = None if self._learner.next is None else self._learner.next.version
        if version is None or version in self._read or not folder_of(self._run_folder, version).is_dir():
            return False
        self._read.add(version)
        for group in load_groups([folder_of(self._run_folder, version)]):
            self._groups.put(group)
        return True

    def waits(self) -> list[str]:
        """For errors."""
        return [
            "the run has not written it, or another group of the task later: telemetry.groups_every must be 1"
        ]

    async def close(self) -> None: ...


class _Generators:
    """All generators, each with one of its lives loaded at a time."""

    def __init__(
        self,
        run_folder: Path,
        lives: Sequence[tuple[Life, Config]],
        groups: GroupStore,
        weights: WeightStore,
    ) -> None:
        self._run_folder = run_folder
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
        tokenizer, tasks = policy_tokenizer(config), tasks_of_run(config, self._run_folder)
        if isinstance(tasks, CurriculumStream):
            tasks.read()
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


def _stuck(learner: ReplayedLearner, generators: _Generators | _Saved, groups: GroupStore) -> DivergedError:
    lacks = learner.lacks
    assert lacks is not None
    made = groups.others(lacks.ordinal)
    found = f"{made} other groups of it were made" if made else "no group of it was made"
    waits = "; ".join(generators.waits()) or "the generators have made all that they had recorded"
    return DivergedError(f"the learner needs the recorded group of task {lacks.ordinal}; {found}; {waits}")
