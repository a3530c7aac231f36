"""Checkpoints of a run: whole or not there.

RUN/checkpoints/.v000050.partial/   every rank writes its shards here
RUN/checkpoints/v000050/            the same folder, renamed by rank 0 when all ranks are done
    learner/                        models that change, their optimizers, random state (torch.distributed.checkpoint)
    critic/                         and each other model that learns on a pool: the pool writes it
    meta.msgpack                    version, controls, and where the task streams stand

    trainer thread    ─ begin: copy the shards ─┬─ step ─ step ─ settle: rename, prune ─▸ the queue forgets old steps
                                                │             ▲
    writer thread                               └─ write ─────┘   one checkpoint at a time
"""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Protocol

import msgpack

from asyncrl.config.rules import require
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError, DeadlineError
from asyncrl.learner.backends.backend import Backend
from asyncrl.learner.remote.remote_model import RemoteModel
from asyncrl.system.disk import make_folder, sync_folder, writing
from asyncrl.telemetry import decisions, tracing
from asyncrl.telemetry.spans import Spans
from asyncrl.types import Version

log = logging.getLogger(__name__)

FOLDER, STATE, META = "checkpoints", "learner", "meta.msgpack"
FORMAT = 2
"""Format 1 had no controls."""
NAME, REPLACED = re.compile(r"v\d{6,}"), re.compile(r"\.v\d{6,}\.replaced")

SHARE = "let all machines with ranks of the learner, or with a pool that learns, share run.dir"

NOTHING, WRITING, WRITTEN, FAILED = "", "writing", "written", "failed"
"""States of a rank's part of the checkpoint under way."""


@dataclass(frozen=True, slots=True)
class Meta:
    """Metadata of a checkpoint.

    version      of the policy that is saved
    train, eval  the queue's snapshots of the two streams (opaque)
    controls     coefficients that the run had adapted, by name, see `AdaptiveCoefficients`
    """

    version: Version
    train: bytes
    eval: bytes | None
    controls: Mapping[str, float] = field(default_factory=dict)
    format: int = FORMAT


def of_version(run_folder: Path, version: Version | None) -> Path:
    """The folder of the whole checkpoint of this version, of the newest unless given. ConfigError if there is none."""
    there = {_version(path): path for path in _all(run_folder)}
    wanted = max(there, default=None) if version is None else version
    if wanted is None or wanted not in there:
        versions = ", ".join(map(str, sorted(there))) or "none"
        rule = f"{run_folder / FOLDER} has no whole checkpoint of it; it has: {versions}"
        remedy = "give one of these; checkpoint.keep is how many of the newest stay"
        raise ConfigError("version", version, rule, remedy)
    return there[wanted]


def newest_before(run_folder: Path, version: Version) -> Version:
    """The newest version below `version` that has a whole checkpoint. Raises ConfigError if there is none."""
    there = sorted(map(_version, _all(run_folder)))
    if not there or there[0] >= version:
        rule = f"{run_folder / FOLDER} has no checkpoint before it; it has: {', '.join(map(str, there)) or 'none'}"
        raise ConfigError(
            "version", version, rule, "set checkpoint.every and checkpoint.keep to keep earlier ones"
        )
    return max(one for one in there if one < version)


def is_one(folder: Path) -> bool:
    """Whether this is the folder of a checkpoint."""
    return (folder / META).is_file() and (folder / STATE).is_dir()


def require_one_folder(run_folder: Path, backend: Backend) -> None:
    """Collective. Raises ConfigError on every rank unless all of them see one run folder, e.g. from several machines:
    each writes its part of a checkpoint there."""
    if backend.world == 1:
        return
    # The name is new in each start, and one that the launcher clears away if this process is killed here.
    mark = run_folder / backend.exchange(f".{secrets.token_hex(8)}.partial")[0]
    if backend.rank == 0:
        make_folder(run_folder)
        mark.touch()
    backend.exchange(None)
    every = backend.exchange(mark.exists())
    if backend.rank == 0:
        mark.unlink()
    without = ", ".join(str(rank) for rank, sees in enumerate(every) if not sees)
    require(
        not without,
        "run.dir",
        str(run_folder.parent),
        f"learner rank {without} does not see the files of rank 0 there, and each rank writes its part of a checkpoint",
        SHARE,
    )


def to_resume(run_folder: Path, set_aside: bool = False) -> tuple[Path, Meta] | None:
    """The newest checkpoint that is whole; None if there is no checkpoint at all. Raises ConfigError as `read_meta`.

    A checkpoint torn by a power failure is skipped with a warning if there is an older one. set_aside: rename skipped
    ones, so that they do not count for `checkpoint.keep`.
    """
    torn: list[Path] = []
    for folder in sorted(_all(run_folder), key=_version, reverse=True):
        meta = _read(folder)
        if meta is None:
            torn.append(folder)
            continue
        for passed in torn:
            log.warning("%s is torn (%s): going on from %s, which is older", passed, META, folder.name)
            if set_aside:
                _set_aside(passed)
        return folder, meta
    if torn:
        raise _torn(torn[0])
    return None


def read_meta(checkpoint: Path) -> Meta:
    """Metadata of this format or an older one. Raises ConfigError (key run.resume) if it is cut short, or newer."""
    meta = _read(checkpoint)
    if meta is None:
        raise _torn(checkpoint)
    return meta


def _read(checkpoint: Path) -> Meta | None:
    """The metadata, or None if the file is missing or incomplete."""
    try:
        fields = msgpack.unpackb((checkpoint / META).read_bytes())
        made_in = int(fields["format"])
    except (ValueError, TypeError, KeyError, FileNotFoundError):
        return None
    if made_in > FORMAT:
        rule = f"the checkpoint has format {made_in}, and this asyncrl reads up to {FORMAT}"
        remedy = "go on with the asyncrl that wrote it, or remove this folder to go on from an older one"
        raise ConfigError("run.resume", str(checkpoint), rule, remedy)
    return Meta(**fields)


def _torn(checkpoint: Path) -> ConfigError:
    return ConfigError(
        "run.resume",
        str(checkpoint),
        f"the checkpoint is torn: its {META} is missing or cut short",
        "remove this folder to go on from an older checkpoint, or from the beginning if there is none",
    )


def _set_aside(torn: Path) -> None:
    aside = torn.with_name(f"torn-{torn.name}")
    shutil.rmtree(aside, ignore_errors=True)
    os.replace(torn, aside)


@dataclass(frozen=True, slots=True)
class _UnderWay:
    version: Version
    done: Future[None]


class SavedStream(Protocol):
    """Where groups come from: `TrainStream`."""

    def snapshot(self) -> bytes:
        """Where it stands, for a checkpoint."""
        ...

    def checkpointed(self, version: Version) -> None:
        """A whole checkpoint of this version is there."""
        ...


class Checkpoints:
    """Writes a run's checkpoints, one after the other. Collective: every method but `rescue`.

    remote_models  learn in pools, and are saved there
    empty_eval     snapshot of the eval stream without evaluations under way, on rank 0
    saved          the version that was restored, if one was

    Under `queue.fsync` a whole checkpoint outlives a power failure. So does the queue's journal, which forgets the
    steps before it.
    """

    def __init__(
        self,
        config: Config,
        backend: Backend,
        stream: SavedStream,
        spans: Spans,
        remote_models: Collection[RemoteModel],
        empty_eval: bytes | None,
        saved: Version | None,
    ) -> None:
        self._run_folder = Path(config.run.dir) / config.run.name
        self._settings, self._fsync = config.checkpoint, config.queue.fsync
        self._backend, self._stream, self._spans = backend, stream, spans
        self._remote_models, self._empty_eval = remote_models, empty_eval
        self._newest = saved  # saved, or being saved
        self._under_way: _UnderWay | None = None

    def is_due(self, version: Version) -> bool:
        """Whether it is a `checkpoint.every`-th version."""
        return version % self._settings.every == 0

    def save(self, version: Version, coefficients: Mapping[str, float]) -> None:
        """Begin to save this version, unless it is saved. coefficients: `Meta.controls`."""
        if self._newest == version:
            return
        self.finish()
        with self._spans("wait/checkpoint"):
            self.begin(Meta(version, self._stream.snapshot(), self._empty_eval, coefficients))
        self._newest = version
        if not self._settings.asynchronous:
            self.finish()

    def begin(self, meta: Meta) -> None:
        """Start to save what the backend holds now, none being under way. Returns once its tensors may change."""
        folder = self._partial(meta.version)
        if self._backend.rank == 0:
            for left in self._folder.glob(".v*"):  # by a process that was killed
                if left in _all(self._run_folder):
                    os.replace(left, self._folder / f"v{_version(left):06d}")
                else:
                    shutil.rmtree(left, ignore_errors=True)
            make_folder(self._folder, fsync=self._fsync)
            folder.mkdir()
        self._backend.exchange(None)
        decisions.note("saved", meta.version)
        decisions.flush()  # the next learner may begin from it
        remote = [model.save(folder) for model in self._remote_models]
        beside = self._settings.asynchronous
        save = self._backend.copy_state() if beside else self._backend.save
        done = _start(partial(self._write_traced, save, remote, folder, meta), beside)
        self._under_way = _UnderWay(meta.version, done)

    @property
    def state(self) -> str:
        """The state of this rank's part of the checkpoint under way; for `settle`."""
        if self._under_way is None:
            return NOTHING
        done = self._under_way.done
        return WRITING if not done.done() else FAILED if done.exception() else WRITTEN

    def settle(self, states: Sequence[str]) -> Version | None:
        """Finish the one under way if all ranks have written it, report it to the queue, and return its version.
        states: of all ranks.

        Raises OSError on every rank if the disk of one would not take it; no broken checkpoint stays behind then.
        """
        if FAILED in states:
            self._give_up()
        if set(states) != {WRITTEN}:
            return None
        version = self._commit()
        tracing.event("checkpoint", version=version)
        self._stream.checkpointed(version)
        return version

    def finish(self) -> Version | None:
        """As `settle`, but waits. Raises DeadlineError after `checkpoint.deadline_s`."""
        if self._under_way is None:
            return None
        version, seconds = self._under_way.version, self._settings.deadline_s
        with self._spans("wait/checkpoint"):
            wait([self._under_way.done], seconds)
            finished = self.settle(self._backend.exchange(self.state))
        if finished is None:
            who = f"learner rank {self._backend.rank}"
            raise DeadlineError(who, f"the disk under {self._folder}", f"checkpoint {version}", seconds)
        return finished

    def rescue(self) -> None:
        """Before this rank ends on an error, alone: keep the one under way, if it still gets whole in time."""
        if self._under_way is None:
            return
        wait([self._under_way.done], self._settings.deadline_s)
        if self.state == WRITTEN:  # then so are the others: that is the last thing that a backend waits for
            self._commit()

    def _write_traced(
        self, save: Callable[[Path], None], remote: Sequence[Callable[[], None]], folder: Path, meta: Meta
    ) -> None:
        with tracing.span("disk", "checkpoint", version=meta.version):
            self._write(save, remote, folder, meta)

    def _write(
        self, save: Callable[[Path], None], remote: Sequence[Callable[[], None]], folder: Path, meta: Meta
    ) -> None:
        save(folder / STATE)
        for written in remote:
            written()
        if self._backend.rank == 0:
            for model in self._remote_models:
                require(
                    (folder / model.name).is_dir(),
                    "run.dir",
                    str(self._run_folder.parent),
                    f"the pool of the {model.name} has written its part of {folder.name} elsewhere",
                    SHARE,
                )
            with writing(folder / META), (folder / META).open("wb") as file:
                file.write(msgpack.packb(asdict(meta)))
                if self._fsync:
                    file.flush()
                    os.fsync(file.fileno())

    def _commit(self) -> Version:
        assert self._under_way is not None
        version, self._under_way = self._under_way.version, None
        if self._backend.rank == 0:
            final = self._folder / f"v{version:06d}"
            replaced = self._folder / f".{final.name}.replaced"
            if final.exists():  # made before, then trained again from an older one
                os.replace(final, replaced)
            self._rename(self._partial(version), final)
            shutil.rmtree(replaced, ignore_errors=True)
            for old in sorted(_all(self._run_folder), key=_version)[: -self._settings.keep]:
                pruned = old.with_name(f".{old.name}.pruned")
                # Whole or not there, also if this process dies here.
                os.replace(old, pruned)
                shutil.rmtree(pruned, ignore_errors=True)
        return version

    def _rename(self, partial: Path, final: Path) -> None:
        """The files of tensors are on the disk already: torch.distributed.checkpoint syncs them."""
        if self._fsync:
            for folder in (*(path for path in partial.iterdir() if path.is_dir()), partial):
                sync_folder(folder)
        os.replace(partial, final)
        if self._fsync:
            sync_folder(self._folder)

    def _give_up(self) -> None:
        assert self._under_way is not None
        under_way, self._under_way = self._under_way, None
        wait([under_way.done], self._settings.deadline_s)
        if self._backend.rank == 0:
            shutil.rmtree(self._partial(under_way.version), ignore_errors=True)
        under_way.done.result(timeout=0)  # raises, unless only another rank has failed
        raise OSError(errno.EIO, "another rank could not write its part", str(self._folder))

    @property
    def _folder(self) -> Path:
        return self._run_folder / FOLDER

    def _partial(self, version: Version) -> Path:
        return self._folder / f".v{version:06d}.partial"


def _start(work: Callable[[], None], in_thread: bool) -> Future[None]:
    """Run the work, now or in a daemon thread: a process that has waited long enough can end without it."""
    done: Future[None] = Future()

    def run() -> None:
        try:
            work()
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)

    if in_thread:
        Thread(target=run, name="checkpoint", daemon=True).start()
    else:
        run()
    return done


def _all(run_folder: Path) -> list[Path]:
    """The checkpoints of a run, one of each version: also one that was being replaced when its process was killed."""
    folder = run_folder / FOLDER
    whole = [path for path in folder.glob("v*") if NAME.fullmatch(path.name)]
    versions = {_version(path) for path in whole}
    replaced = [path for path in folder.glob(".v*") if REPLACED.fullmatch(path.name) and is_one(path)]
    return whole + [path for path in replaced if _version(path) not in versions]


def _version(checkpoint: Path) -> Version:
    return int(re.sub(r"\D", "", checkpoint.name))
