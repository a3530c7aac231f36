"""A headless Chromium, for pictures of the dashboard and for its tests. It reaches this machine alone."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
)
DEADLINE_S = 30.0
"""Longest wait for anything in the browser."""


def programs() -> tuple[str, str] | None:
    """Paths of Chromium and its driver; None where one is missing."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    return (browser, driver) if browser and driver else None


@contextmanager
def chromium(width: int = 1280, height: int = 1000, dark: bool = False) -> Iterator[Chrome]:
    """Requires `programs` and selenium."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    found = programs()
    assert found, "chromium or chromedriver is missing"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = found[0]
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        driver = webdriver.Chrome(options=options, service=Service(found[1]))
        try:
            driver.set_page_load_timeout(DEADLINE_S)
            driver.set_script_timeout(DEADLINE_S)
            resize(driver, width, height)
            scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
            driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
            yield driver
        finally:
            driver.quit()


def resize(driver: Chrome, width: int, height: int) -> None:
    """In CSS pixels of the page, one of the screen each."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def open_page(driver: Chrome, address: str) -> None:
    """Open a dashboard or a report and wait until it has drawn a run."""
    driver.get(address)
    wait_for(
        driver,
        "document.getElementById('runs').dataset.ready && document.querySelector('canvas').dataset.drawn",
    )


def wait_for(driver: Chrome, condition: str) -> Any:
    """Wait for a JavaScript expression to become true; its value. Raises selenium's TimeoutException."""
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(driver, DEADLINE_S, 0.1).until(
        lambda it: it.execute_script(f"return {condition}"), condition
    )


def errors(driver: Chrome) -> list[str]:
    """What the page has put on its console since the last call, apart from notes."""
    return [
        entry["message"] for entry in driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")
    ]
