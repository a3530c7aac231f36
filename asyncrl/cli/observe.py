"""Commands that look at runs."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.cli.command import Arguments, Command, option
from asyncrl.errors import ConfigError

if TYPE_CHECKING:
    from asyncrl.observability.scaling_curve import Forecast


def _dash(arguments: Arguments) -> int:
    from asyncrl.system.packages import check_package

    check_package("aiohttp", "server", "dash", " ".join(arguments.runs))
    folders = _folders(arguments)
    from asyncrl.observability.dash.serve import serve

    def announce(address: str) -> None:
        if arguments.announce is None:
            print(f"{', '.join(folder.name for folder in folders)}: {address}", flush=True)
            return
        with os.fdopen(arguments.announce, "w") as launcher:
            launcher.write(f"{address}\n")

    serve(folders, arguments.host, arguments.port, announce)
    return 0


def _report(arguments: Arguments) -> int:
    folders = _folders(arguments)
    from asyncrl.observability.report import write_report

    size = write_report(folders, Path(arguments.output))
    print(f"{arguments.output}: {size / 1e6:.1f} MB")
    return 0


def _doctor(arguments: Arguments) -> int:
    from asyncrl.launch.views.findings import diagnosis, diagnosis_text
    from asyncrl.observability.run_files import RunFiles

    runs = [RunFiles(folder) for folder in _folders(arguments)]
    for run in runs:
        run.read()
    if arguments.json:
        print(json.dumps([diagnosis(run) for run in runs], indent=2))
    else:
        width = min(120, shutil.get_terminal_size().columns)
        print("\n\n".join(diagnosis_text(run, width) for run in runs))
    return 0


def _top(arguments: Arguments) -> int:
    (folder,) = _folders(arguments)
    from asyncrl.launch.views.top import show

    show(folder, arguments.once)
    return 0


def _trace(arguments: Arguments) -> int:
    from asyncrl.telemetry.trace_file import FOLDER, SUFFIX

    (folder,) = _folders(arguments)
    if not any((folder / FOLDER).glob(f"*{SUFFIX}")):
        raise ConfigError("run", str(folder), "has no traces", "run with telemetry.trace_mb above 0")
    if arguments.otlp is not None:
        from asyncrl.system.packages import check_package

        package = "opentelemetry-exporter-otlp-proto-http"
        check_package("opentelemetry", "otlp", "otlp", arguments.otlp, package)
        from asyncrl.observability.otlp import send_spans

        print(f"{arguments.otlp}: {send_spans(folder, arguments.otlp)} spans")
        return 0
    from asyncrl.observability.trace_export import write_trace

    size = write_trace(folder, Path(arguments.output))
    print(f"{arguments.output}: {size / 1e6:.1f} MB, for ui.perfetto.dev")
    return 0


def _fit(arguments: Arguments) -> int:
    from dataclasses import asdict

    from asyncrl.observability.rows import EVALUATION, MetricRows
    from asyncrl.observability.scaling_curve import forecast, points_of

    (folder,) = _folders(arguments)
    rows = MetricRows(folder)
    rows.read()
    metric = arguments.metric
    points = points_of(rows, metric, hours=arguments.hours)
    try:
        share = metric.rpartition("/")[2].startswith(SHARES) and all(score <= 1.0 for _, score in points)
        found = forecast(points, most=1.0 if share else math.inf)
    except ValueError as error:
        known = sorted({key for row in rows.evaluations for key in row if key.startswith(EVALUATION)})
        remedy = (
            f"run longer, or with a lower evaluation.every; it has {', '.join(known) or 'no evaluations'}"
        )
        raise ConfigError("--metric", metric, str(error), remedy) from None
    if arguments.json:
        print(json.dumps({"run": folder.name, "metric": metric, **asdict(found)}, indent=2))
    else:
        print(_fit_text(f"{metric} of {folder.name}", found, "hours" if arguments.hours else "versions"))
    return 0


def _fit_text(what: str, found: Forecast, unit: str) -> str:
    first, last = found.points[found.half], found.points[-1]
    lines = [
        f"{what}: {len(found.points)} evaluations, {found.points[0][0]:g} to {last[0]:g} {unit}",
        "",
        f"{'fit of':<16}{'asymptote':>10}{'midpoint':>10}{'exponent':>10}{'error':>8}",
    ]
    for name, curve, points in (
        ("the first half", found.early, found.points[: found.half]),
        ("all", found.whole, found.points),
    ):
        figures = f"{curve.asymptote:>10.3f}{curve.midpoint:>10.3g}{curve.exponent:>10.2f}{curve.error(points):>8.3f}"
        lines.append(f"{name:<16}{figures}")
    return "\n".join(
        [
            *lines,
            "",
            f"From {first[0]:g} {unit} on, the fit of the first half is off by {found.early_error:.3f} "
            f"(root mean square); its last score, carried on, by {found.carried_error:.3f}.",
            f"At {last[0]:g} {unit}: {found.early.at(last[0]):.3f} by the first half, {last[1]:.3f} in the run. "
            f"At {2 * last[0]:g}: {found.whole.at(2 * last[0]):.3f} by the fit of all.",
        ]
    )


def _folders(arguments: Arguments) -> list[Path]:
    """Raises ConfigError (key run) for one that is no folder of a run."""
    from asyncrl.launch.folder.run_folder import find_run

    folders = [find_run(run) for run in arguments.runs]
    for given, folder in zip(arguments.runs, folders, strict=True):
        remedy = "give the folder of a run, or its name under runs/"
        if not folder.is_dir():
            raise ConfigError("run", given, "is no folder", remedy)
        if not any((folder / name).exists() for name in SIGNS_OF_A_RUN):
            raise ConfigError("run", given, f"holds none of {', '.join(SIGNS_OF_A_RUN)}", remedy)
    return folders


SHARES = ("accuracy", "pass@", "maj@")
"""Begin the names of scores that are at most 1, where rewards are."""

SIGNS_OF_A_RUN = ("config.yaml", "metrics.jsonl", "trace")

RUNS, RUN = (
    option("runs", metavar="RUN", nargs=count, help="folder of a run, or its name under runs/")
    for count in ("+", 1)
)

COMMANDS: dict[str, Command] = {
    "dash": Command(
        _dash,
        "look at runs in a browser, live or afterwards",
        "Serve a page with what every process of a run does, its curves, the queue, weights, events and rollouts. "
        "It only reads the folders. Several runs lie over each other. It is open to this machine alone "
        "unless --host names another address, which then needs the token that is printed. Ctrl-C ends it.",
        "asyncrl dash demo",
        (
            RUNS,
            option(
                "--host", default="127.0.0.1", help="to listen at, 0.0.0.0 for all; 127.0.0.1 unless given"
            ),
            option("--port", type=int, help="8420 or the next free one unless given"),
            option(
                "--announce", type=int, metavar="FD", help="write the address to this file descriptor instead"
            ),
        ),
        takes_config=False,
    ),
    "doctor": Command(
        _doctor,
        "what is wrong with a run, and the key to change",
        "Look at the files of runs, live or over, and name what is wrong with them: a sentence, its evidence and the "
        "key to change. A run without findings gets the list of what was looked at. It only reads the folders.",
        "asyncrl doctor demo",
        (RUNS, option("--json", action="store_true", help="for programs")),
        takes_config=False,
    ),
    "top": Command(
        _top,
        "a run in a terminal, live or afterwards",
        "Show a run's state and pace, what is wrong with it, its figures, what each process does now, and the last "
        "events, from the files of its folder. It only reads them. Ctrl-C ends it.",
        "asyncrl top demo",
        (
            RUN,
            option("--once", action="store_true", help="print one screen and end"),
        ),
        takes_config=False,
    ),
    "report": Command(
        _report,
        "the same page as one file, to send around",
        "Write the page of `asyncrl dash` with the data of some runs into one HTML file, which needs no server and no "
        "network. Paths, configuration and logs are not in it; rollouts and their pictures are.",
        "asyncrl report demo --output demo.html",
        (
            RUNS,
            option("--output", default="report.html", metavar="FILE", help="report.html unless given"),
        ),
        takes_config=False,
    ),
    "fit": Command(
        _fit,
        "how far a run will get: a sigmoid of its held-out scores",
        "Fit a sigmoid to the evaluations of a run (ScaleRL, arXiv 2510.13786). A fit of the first half is compared "
        "with the second half, and with the first half's last score carried on; a fit of all says what twice as "
        "much training would bring. It only reads the folder.",
        "asyncrl fit demo",
        (
            RUN,
            option("--metric", default="eval/accuracy", help="of evaluations; eval/accuracy unless given"),
            option("--hours", action="store_true", help="against hours of training instead of versions"),
            option("--json", action="store_true", help="for programs"),
        ),
        takes_config=False,
    ),
    "trace": Command(
        _trace,
        "the traces of a run as one file for Perfetto, or as spans for OpenTelemetry",
        "Write what every process of a run did into one file in the Trace Event Format, which ui.perfetto.dev and "
        "chrome://tracing open: processes, their lanes, events, figures, and arrows from a group's making to its "
        "training and from a version's snapshot to its flips. --otlp sends the spans to a collector instead.",
        "asyncrl trace demo --output demo.json.gz",
        (
            RUN,
            option("--output", default="trace.json.gz", metavar="FILE", help="trace.json.gz unless given"),
            option("--otlp", metavar="URL", help="OTLP over HTTP, http://HOST:4318/v1/traces"),
        ),
        takes_config=False,
    ),
}
