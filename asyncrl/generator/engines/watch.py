"""Notices an engine that as a whole makes no progress: no token of any sample, and no end of a flip.

tokens rise, or a flip ends ──▸ the wait begins anew
nothing to do, or no weights ─▸ the same: samples that wait for the learner's weights are not the engine's fault
"""

from __future__ import annotations

from collections.abc import Mapping

from asyncrl.errors import DeadlineError
from asyncrl.generator.engines.engine import Engine
from asyncrl.types import NO_VERSION

TOKEN_S = 1.0
"""Longest time of one token, for engines that count tokens only when their sample ends."""

LONGEST_LOOK_S = 5.0
"""Most seconds that count between two looks. More have passed if this process was stopped: then the engine was too."""


class EngineWatch:
    """The wait for the next progress of one engine. who: its generator"""

    def __init__(self, who: str, engine: Engine, deadline_s: float) -> None:
        self._who, self._engine, self._deadline_s = who, engine, deadline_s
        self._before: tuple[float, bool] | None = None
        self._looked, self._waited_s = 0.0, 0.0

    def look(self, now: float, stats: Mapping[str, float], flipping: bool) -> None:
        """stats: of the engine, now. Raises DeadlineError."""
        passed_s, self._looked = min(now - self._looked, LONGEST_LOOK_S), now
        before, self._before = self._before, (stats["tokens"], flipping)
        busy = stats["running"] + stats["waiting"] > 0 and self._engine.version != NO_VERSION
        if before != self._before or not (busy or flipping):
            self._waited_s = 0.0
            return
        self._waited_s += passed_s
        if self._waited_s >= self._deadline_s + TOKEN_S * stats.get("uncounted", 0.0):
            version = self._engine.version
            raise DeadlineError(
                self._who,
                f"its engine ({type(self._engine).__name__})",
                f"the end of a flip from version {version}" if flipping else f"a token of version {version}",
                self._waited_s,
                f"{stats['running']:.0f} samples run, {stats['waiting']:.0f} wait for a slot; the limit is "
                f"generator.progress_deadline_s={self._deadline_s:g}",
            )
