"""Findings of the doctor on a terminal: those of a run as text, and new ones of a live run as warnings.

run folder ──▸ thread, every EVERY_S ──▸ findings that were not there before ──▸ the launcher prints them
"""

from __future__ import annotations

import logging
import queue
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from asyncrl.launch.views.output import within_line
from asyncrl.observability.doctor.facts import Finding, RunFacts
from asyncrl.observability.doctor.rules import RULES, findings
from asyncrl.observability.overview import overview
from asyncrl.observability.rows import number
from asyncrl.observability.run_files import RunFiles

EVERY_S = 30.0
ENDS_WITHIN_S = 5.0

KEEPS_S, KEEPS_VERSIONS = 600.0, 200
"""Lanes before those that rules look at, for comparison: so long, and of so many versions."""

MOST_ROWS = 2000
"""Of versions, that rules look at in a run that goes on for long; the oldest ones lie ever further apart."""

INDENT = 10

log = logging.getLogger(__name__)


def diagnosis(run: RunFiles) -> dict[str, Any]:
    """The findings of a run, and the rules that were and were not applied."""
    facts, head = RunFacts.of(run), overview(run)
    return {
        "run": run.name,
        **{name: head[name] for name in ("state", "version", "versions", "bottleneck")},
        "findings": [finding.answer() for finding in findings(facts)],
        "looked_at": [rule.name for rule in RULES if rule.applies(facts)],
        "too_little_data": [rule.name for rule in RULES if not rule.applies(facts)],
    }


def diagnosis_text(run: RunFiles, width: int) -> str:
    found = diagnosis(run)
    of = "" if found["versions"] is None else f" of {found['versions']}"
    lines = [
        within_line(
            f"{found['run']}: {found['state']}, version {found['version']}{of}. {found['bottleneck']}"
        )
    ]
    for finding in found["findings"]:
        lines += ["", *finding_lines(finding, width)]
    about = {rule.name: rule.looks_at for rule in RULES}
    looked, lacking = found["looked_at"], found["too_little_data"]
    if not found["findings"]:
        lines += ["", "Nothing was found. Looked at:", *(f"  {name:<18}{about[name]}" for name in looked)]
    untraced = [rule.name for rule in RULES if rule.traces and not run.timeline.processes]
    few = [name for name in lacking if name not in untraced]
    for why, names in (("Too few versions yet", few), ("No traces (telemetry.trace_mb)", untraced)):
        if names:
            lines += ["", *textwrap.wrap(f"{why} to look at: {', '.join(names)}.", width)]
    return "\n".join(lines)


def finding_lines(finding: dict[str, str], width: int) -> list[str]:
    """The severity beside the sentence, its evidence and remedy below."""
    texts = [finding["sentence"], f"{finding['evidence']}." if finding["evidence"] else "", finding["remedy"]]
    lines = [
        line for text in filter(None, texts) for line in textwrap.wrap(within_line(text), width - INDENT)
    ]
    return [
        f"{within_line(finding['severity']) if at == 0 else '':<{INDENT}}{line}"
        for at, line in enumerate(lines)
    ]


class LiveFindings:
    """Findings of a run that goes on for long: lanes that no rule looks at are forgotten, old rows are thinned out."""

    def __init__(self, run: RunFiles) -> None:
        self._run, self._seen = run, set[tuple[str, str]]()

    def all(self) -> list[Finding]:
        """Those of now."""
        self._run.read()
        facts = RunFacts.of(self._run)
        oldest = next((number(row, "time") for row in facts.rows[-KEEPS_VERSIONS:]), None)
        self._run.timeline.forget(max(facts.since - KEEPS_S, oldest or 0.0))
        self._run.metrics.thin(MOST_ROWS)
        return findings(facts)

    def new(self) -> list[Finding]:
        """Those that are no notes and were not returned before."""
        found = [each for each in self.all() if each.severity != "note"]
        new = [each for each in found if (each.rule, each.about) not in self._seen]
        self._seen.update((each.rule, each.about) for each in found)
        return new


@contextmanager
def warnings_beside(folder: Path, every_s: float = EVERY_S) -> Iterator[Callable[[], list[str]]]:
    """Inside, a thread looks at the run. Returns the lines of new findings since the last call, and never raises."""
    lines, ended = queue.SimpleQueue[str](), threading.Event()

    def look() -> None:
        live = LiveFindings(RunFiles(folder))
        try:
            while not ended.wait(every_s):
                for finding in live.new():
                    lines.put(
                        f"{finding.severity}: {finding.sentence} {finding.evidence}. {finding.remedy()}"
                    )
        except Exception:
            log.exception("the run is not looked at any more; it goes on")

    def taken() -> list[str]:
        return [within_line(lines.get_nowait()) for _ in range(lines.qsize())]

    thread = threading.Thread(target=look, name="findings", daemon=True)
    thread.start()
    try:
        yield taken
    finally:
        ended.set()
        thread.join(ENDS_WITHIN_S)
