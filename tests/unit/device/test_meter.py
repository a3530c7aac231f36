"""The meter of GPUs, with the driver's figures made up."""

from __future__ import annotations

from dataclasses import astuple

import pytest
import torch

from asyncrl.device import accelerator, meter
from asyncrl.device.meter import GpuMeter, GpuTotals, measured


def test_totals_are_sums_over_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPU 1 is busy for half, then all of the time, GPU 3 for a tenth; they draw 100 and 300 watts."""
    busy = {1: 50, 3: 10}
    monkeypatch.setattr(torch.cuda, "utilization", busy.__getitem__)
    monkeypatch.setattr(torch.cuda, "power_draw", {1: 100_000, 3: 300_000}.__getitem__)
    gpus = GpuMeter([1, 3])
    assert gpus.totals.figures() == {}
    gpus.add(2.0)
    before = gpus.totals
    assert astuple(before) == pytest.approx((4.0, 1.2, 800.0))
    assert before.figures() == pytest.approx({"gpu_busy": 0.3, "gpu_watts": 200.0})
    busy[1] = 100
    gpus.add(1.0)
    assert astuple(gpus.totals.since(before)) == pytest.approx((2.0, 1.1, 400.0))


def test_what_cannot_be_measured_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = iter(["cpu", "cuda"])
    monkeypatch.setattr(accelerator, "kind", lambda: next(kinds))
    assert measured([0]) is None
    asked = []

    def fail(device: int) -> int:
        asked.append(device)
        raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed")

    monkeypatch.setattr(torch.cuda, "utilization", fail)
    assert measured([2]) is None
    assert asked == [2]


def test_a_driver_that_fails_ends_the_measurement_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(meter, "EVERY_S", 0.001)
    monkeypatch.setattr(torch.cuda, "utilization", lambda _: 100)
    watts = iter([200_000, 200_000])  # of the first look, and of one more
    monkeypatch.setattr(torch.cuda, "power_draw", lambda _: next(watts))
    gpus = GpuMeter([0])
    gpus._run()
    assert "no longer measured" in caplog.text
    assert gpus.totals.seconds > 0
    assert gpus.totals == GpuTotals(*[gpus.totals.seconds] * 2, 200 * gpus.totals.seconds)
