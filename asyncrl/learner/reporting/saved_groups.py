"""Groups in files: as the queue carries them, so that they can be looked at, and trained on again.

RUN/groups/v000010/<ordinal>.group     every telemetry.groups_every-th version, and versions with numbers that are
                                       not finite: each learner rank writes its own
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from asyncrl.errors import ConfigError, WireError
from asyncrl.queue.wire.payload import decode_group, encode_group
from asyncrl.system.disk import open_to_read, writing
from asyncrl.types import Group, Version

log = logging.getLogger(__name__)

FOLDER, SUFFIX = "groups", ".group"
MAGIC = b"asyncrl group 1"


class KeptGroups:
    """Holds the groups of the version in training, and writes them where they are wanted.

    every: versions between those whose groups are all written; 0: only bad ones are
    """

    def __init__(self, run_folder: Path, every: int) -> None:
        self._run_folder, self._every = run_folder, every
        self._groups: list[Group] = []
        self._before: list[Group] = []
        self._all = False

    def begin(self, version: Version) -> None:
        """version: that the groups to come will publish"""
        self._before, self._groups = self._groups, []
        self._folder = folder_of(self._run_folder, version)
        self._all = self._every > 0 and version % self._every == 0

    def forget_before(self) -> None:
        """Forget the groups of the version before. To free them takes a while, best while a device computes."""
        self._before = []

    def add(self, groups: Sequence[Group]) -> None:
        """Take the groups of one claim."""
        self._groups += groups
        if self._all:
            save_groups(self._folder, groups)

    def save_bad(self, ordinals: Iterable[int]) -> None:
        """Write those of `ordinals`, which led to numbers that are not finite."""
        wanted = {*ordinals}
        self.save([group for group in self._groups if group.task.ordinal in wanted])

    def save(self, bad: Sequence[Group]) -> None:
        """Write groups that cannot be trained on."""
        if bad:
            written = save_groups(self._folder, bad)
            log.warning(
                "%d of %d groups that cannot be trained on are in %s", written, len(bad), self._folder
            )


def folder_of(run_folder: Path, version: Version) -> Path:
    """Where the groups are that published `version`."""
    return run_folder / FOLDER / f"v{version:06d}"


def save_groups(folder: Path, groups: Iterable[Group]) -> int:
    """Write a file for each group; one of an earlier try of the same version is replaced. Returns how many were
    written: a group that no queue could carry is named in a warning instead."""
    written = 0
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for group in groups:
            try:
                save_group(folder / f"{group.task.ordinal}{SUFFIX}", group)
                written += 1
            except (WireError, UnicodeError) as error:
                log.warning(
                    "the group of task %d is not written to %s: %s", group.task.ordinal, folder, error
                )
    return written


def save_group(path: Path, group: Group) -> None:
    """Raises WireError for a group that nobody could read."""
    frames = [bytes(frame) for frame in encode_group(group).frames]
    with writing(path):
        path.write_bytes(msgspec.msgpack.encode([MAGIC, *frames]))


def load_groups(paths: Iterable[Path]) -> Iterator[Group]:
    """The groups of files, and of all files of folders, by ordinal. Raises ConfigError for one that cannot be read."""
    for path in paths:
        inside = sorted(path.rglob(f"*{SUFFIX}"), key=lambda each: (len(each.name), each.name))
        if path.is_dir() and not inside:
            remedy = "give a folder below the groups/ of a run with telemetry.groups_every"
            raise ConfigError("file", str(path), "holds no groups", remedy)
        yield from map(_read, inside if path.is_dir() else [path])


def _read(path: Path) -> Group:
    try:
        with open_to_read(path) as file:
            magic, *frames = msgspec.msgpack.decode(file.read(), type=list[bytes])
        if magic != MAGIC:
            raise WireError(f"it begins with {magic[:32]!r}")
        return decode_group(frames)
    except (OSError, ValueError, msgspec.DecodeError, WireError) as error:
        rule = f"holds no group that this version of asyncrl reads: {error}"
        raise ConfigError("file", str(path), rule, "give a file below the groups/ of a run") from None
