"""python -m bench.screenshots: docs/figures/dashboard-*.png, of the runs in runs.py; about five minutes on two cores.

    make test && python -m bench.screenshots            # runs that are there already are not made again
    python -m bench.screenshots healthy stale-data      # these alone

Needs Chromium, its driver and selenium, and the demo's warmed-up model (`asyncrl demo --warm-up`).
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from asyncrl.observability.report import write_report
from bench.process import ROOT
from bench.screenshots.browser import chromium, errors, open_page
from bench.screenshots.runs import RUNS, make

FIGURES = ROOT / "docs" / "figures"
WIDTH = 1280
HEIGHTS = {"healthy": 1500, "hacked-reward": 1480}
HEIGHT = 1150
DARK = ("stale-data",)
COLORS = 128


def main() -> int:
    parser = argparse.ArgumentParser("python -m bench.screenshots", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*RUNS, []], help="of the runs; all unless given")
    parser.add_argument("--dir", type=Path, default=Path("runs/screenshots"), help="holds the runs")
    arguments = parser.parse_args()
    for name in arguments.names or RUNS:
        if not (arguments.dir / name / "summary.json").exists():
            make(name, arguments.dir)
        picture = FIGURES / f"dashboard-{name}.png"
        take(arguments.dir / name, picture, HEIGHTS.get(name, HEIGHT), name in DARK)
        print(f"{picture.relative_to(ROOT)}: {picture.stat().st_size / 1e3:.0f} kB")
    return 0


def take(run: Path, picture: Path, height: int, dark: bool) -> None:
    """The top of a run's page, in few colours. RuntimeError for a page that complains."""
    from PIL import Image

    with tempfile.TemporaryDirectory() as folder, chromium(WIDTH, height, dark) as driver:
        report, raw = Path(folder) / "report.html", Path(folder) / "raw.png"
        write_report([run], report)
        open_page(driver, report.as_uri())
        driver.save_screenshot(str(raw))
        if complaints := errors(driver):
            raise RuntimeError("\n".join(complaints))
        Image.open(raw).convert("RGB").quantize(COLORS).save(picture, optimize=True)


if __name__ == "__main__":
    raise SystemExit(main())
