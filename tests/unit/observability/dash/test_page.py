"""The page in a real Chromium: it draws, zooms, opens rollouts, follows, and says nothing on its console."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest
from missing import needs_chromium

from asyncrl.observability.dash.page_data import PageData, View
from asyncrl.observability.dash.serve import serve_until
from asyncrl.observability.report import write_report
from bench.screenshots.browser import chromium, errors, open_page, resize, wait_for

HOSTILE = "<script>window.stolen = 1</script><img src=x onerror='window.stolen = 1'>"
T = 1_795_000_000.0
SIZES = [(1280, False), (1280, True), (3840, False), (3840, True)]

pytestmark = needs_chromium


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def version_row(version: int) -> dict[str, Any]:
    waits = {"perf/wait_fraction/groups": 0.4, "perf/busy/learner": 0.6, "perf/busy/generator": 0.9}
    rewards = {"rollout/reward/mean": version / 50, "rollout/reward/std": 0.2}
    return {
        "version": version,
        "time": T + version,
        "perf/step_s": 1.0,
        "train/staleness/max": 1,
        **waits,
        **rewards,
    }


def trace(folder: Path, name: str, role: str, lane: str, spans: int) -> None:
    head = {"t": T, "process": name, "role": role, "host": "a", "pid": 1}
    names = ("compute", "wait/groups")
    rows = [{"t": T + 40 * i / spans, "lane": lane, "do": names[i % 2]} for i in range(spans)]
    write_rows(folder / "trace" / f"{name}.jsonl", [head, *rows, {"t": T + 40, "lane": lane, "do": None}])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / HOSTILE.replace("/", "_")
    write_rows(folder / "metrics.jsonl", [version_row(v) for v in range(1, 41)])
    write_rows(folder / "metrics.jsonl", [{"version": 40, "time": T + 41, "eval/accuracy": 0.5}])
    piece = {"text": "7", "version": 3, "logprob": -0.5, "learner_logprob": -0.7}
    segments = [[{"text": "1+1=", "by": "prompt"}, piece, {"text": HOSTILE, "by": "environment"}, piece]]
    plain = {
        "version": 5,
        "ordinal": 1,
        "prompt": "1+1=",
        "answer": HOSTILE,
        "reward": 0.0,
        "parts": {HOSTILE: 0.5},
    }
    write_rows(
        folder / "rollouts.jsonl",
        [plain, {**plain, "version": 6, "reward": 1.0, "segments": segments, "tokens": 2}],
    )
    trace(folder, "learner", "learner", "learner", 400)
    trace(folder, "generator-0", "generator", "engine", 400)
    write_rows(
        folder / "trace" / "queue.jsonl",
        [
            {"t": T, "process": "queue", "role": "queue", "host": "a", "pid": 2},
            {"t": T + 5, "event": "refused", "reason": HOSTILE, "count": 1},
            *({"t": T + i, "values": {"queue/ready": i % 5}} for i in range(40)),
        ],
    )
    return folder


@contextmanager
def served(*folders: Path) -> Iterator[str]:
    addresses: list[str] = []
    ready, ended = Event(), Event()

    def announce(address: str) -> None:
        addresses.append(address)
        ready.set()

    server = Thread(target=serve_until, args=(folders, "127.0.0.1", 0, announce, ended), daemon=True)
    server.start()
    assert ready.wait(30.0), "the server does not announce its address"
    yield addresses[0]
    ended.set()
    server.join(30.0)
    assert not server.is_alive()


def look(address: str, width: int, dark: bool) -> None:
    """Open a page, use all that can be clicked, and find nothing on its console."""
    with chromium(width, 1400, dark) as driver:
        open_page(driver, address)
        run_script: Callable[..., Any] = driver.execute_script
        assert "version 40" in run_script("return document.getElementById('progress').textContent")
        assert run_script("return document.documentElement.scrollWidth <= innerWidth"), "it scrolls sideways"
        background = run_script("return getComputedStyle(document.body).backgroundColor")
        assert (background == "rgb(18, 22, 28)") == dark
        charts = run_script(
            "return [...document.querySelectorAll('.chart:not([hidden]) canvas')].map(c => c.width)"
        )
        assert len(charts) >= 5
        assert min(charts) > 100
        drawn = "(() => { const c = document.querySelector('#lanes canvas'), d = c.getContext('2d')"
        drawn += (
            ".getImageData(0, 0, c.width, c.height).data; return new Set(new Uint32Array(d.buffer)).size })()"
        )
        assert run_script(f"return {drawn}") > 20
        wait_for(driver, "document.querySelector('.finding.note .remedy') !== null")
        zoom(driver)
        run_script("document.querySelector('details.rollout summary').click()")
        wait_for(driver, "document.querySelectorAll('details.rollout[open] .token').length === 2")
        opened = run_script("return document.querySelector('details.rollout[open]').textContent")
        assert "<script>" in opened  # as text
        assert not run_script(
            "return window.stolen || document.querySelector('main img, main script') !== null"
        )
        assert errors(driver) == []


def zoom(driver: Any) -> None:
    """By a button, by dragging and by the wheel; and back."""
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.actions.wheel_input import ScrollOrigin

    axis = "document.querySelector('#tools button').getAttribute('aria-pressed')"
    canvas = driver.find_element("css selector", "#lanes canvas")
    driver.execute_script("document.querySelector('#lanes').scrollIntoView({block: 'center'})")
    driver.find_element("css selector", "#tools button[title='Zoom in']").click()
    wait_for(driver, f"{axis} === 'false'")
    before = driver.execute_script("return document.querySelector('canvas').toDataURL()")
    chain = ActionChains(driver).move_to_element_with_offset(canvas, 0, 0).click_and_hold()
    chain.move_by_offset(150, 0).release().perform()
    wait_for(driver, f"document.querySelector('canvas').toDataURL() !== {json.dumps(before)}")
    before = driver.execute_script("return document.querySelector('canvas').toDataURL()")
    ActionChains(driver).scroll_from_origin(ScrollOrigin.from_element(canvas), 0, -300).perform()
    wait_for(driver, f"document.querySelector('canvas').toDataURL() !== {json.dumps(before)}")
    driver.find_element("css selector", "#tools button[title='From the first to the last moment']").click()
    wait_for(driver, f"{axis} === 'true'")


@pytest.mark.parametrize(
    ("width", "dark"), [SIZES[0], *(pytest.param(*size, marks=pytest.mark.slow) for size in SIZES[1:])]
)
def test_a_run_is_looked_at(run: Path, width: int, dark: bool) -> None:
    with served(run) as address:
        look(address, width, dark)


@pytest.mark.slow
@pytest.mark.parametrize(("width", "dark"), SIZES)
def test_a_report_is_looked_at_without_a_server(run: Path, tmp_path: Path, width: int, dark: bool) -> None:
    write_report([run], tmp_path / "report.html")
    look((tmp_path / "report.html").as_uri(), width, dark)


def test_a_run_without_traces_says_so_and_one_with_them_has_numbers_for_its_leases(
    run: Path, tmp_path: Path
) -> None:
    """On a screen of 3840 pixels a section's six charts take the whole width; a long version counts by its seconds."""
    write_rows(run / "trace" / "queue.jsonl", [{"t": T + 20, "values": {"queue/oldest_lease_s": 4.2}}])
    write_report([run], tmp_path / "report.html")
    long = {**version_row(40), "perf/step_s": 9.0, "perf/busy/learner": 0.0}
    write_rows(tmp_path / "old" / "metrics.jsonl", [*(version_row(v) for v in range(1, 40)), long])
    write_report([tmp_path / "old"], tmp_path / "old.html")
    hidden = "return document.getElementById('untraced').hidden"
    with chromium(3840, 1400, False) as driver:
        open_page(driver, (tmp_path / "report.html").as_uri())
        wait_for(driver, "document.querySelector('#queue').textContent.includes('at most 5')")
        assert driver.execute_script(hidden)
        columns = "return getComputedStyle(document.getElementById('charts')).gridTemplateColumns.split(' ')"
        assert len(driver.execute_script(columns)) == 6
        open_page(driver, (tmp_path / "old.html").as_uri())
        assert not driver.execute_script(hidden)
        assert "Learner busy30 %" in driver.execute_script(
            "return document.getElementById('tiles').textContent"
        )


@pytest.mark.slow
def test_a_live_run_is_followed_and_several_lie_over_each_other(run: Path, tmp_path: Path) -> None:
    write_rows(tmp_path / "second" / "metrics.jsonl", [version_row(v) for v in range(1, 10)])
    with served(run, tmp_path / "second") as address, chromium() as driver:
        open_page(driver, address)
        assert len(driver.find_elements("css selector", "#runs button")) == 2
        write_rows(run / "metrics.jsonl", [version_row(41)])
        write_rows(run / "trace" / "queue.jsonl", [{"t": time.time()}])
        wait_for(driver, "document.getElementById('progress').textContent.includes('running')")
        wait_for(driver, "document.getElementById('progress').textContent.includes('version 41')")
        driver.find_elements("css selector", "#runs button")[1].click()
        wait_for(driver, "document.getElementById('progress').textContent.includes('version 9')")
        resize(driver, 800, 900)
        wait_for(driver, "document.querySelector('#lanes canvas').clientWidth < 800")
        assert errors(driver) == []


@pytest.mark.slow
def test_a_hundred_thousand_spans_are_reduced_to_the_pixels_of_a_screen(tmp_path: Path) -> None:
    for index in range(10):
        trace(tmp_path, f"generator-{index}", "generator", "engine", 10_000)
    data = PageData(tmp_path)
    data.read()
    start, end = data.bounds()
    lanes = data.lanes(View(start, end, 3000, frozenset({"generator"})))["lanes"]
    assert len(lanes) == 10
    assert np.isclose(sum(sum(lane["totals"].values()) for lane in lanes), 400.0, atol=1e-3)
    with served(tmp_path) as address, chromium(3840) as driver:
        open_page(driver, address)
        entries = "performance.getEntriesByType('resource').filter(e => e.name.includes('lanes?'))"
        sizes = driver.execute_script(f"return {entries}.map(e => e.encodedBodySize)")
        assert max(sizes) < 200_000  # bytes: by pixels, not by spans
        assert errors(driver) == []
