"""Streams and events of an accelerator, under torch's names. On the CPU no work is queued, and they do nothing.

      thread of the stream of weights ── its SideStream ─▸ copies, hashes, transfers
      training, decoding ── the stream they are on ──────▸ waits for none of these

A new thread works on the default stream of its device, and so does training. Each thread of the weight stream therefore
enters a stream of its own. Work of another thread is waited for by an event.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from asyncrl.device import accelerator


class StreamEvent:
    """A place in the stream that this thread works on now: what was queued before has been done once it has passed."""

    def __init__(self, device: torch.device) -> None:
        self._event: Any = None
        self._device = device
        if accelerator.is_accelerator(device):
            module = torch.get_device_module(device)
            self._event = module.Event()
            self._event.record(module.current_stream(device))

    def order(self) -> None:
        """Let all that this thread queues from now on begin only once the event has passed. The thread goes on."""
        if self._event is not None:
            self._event.wait(torch.get_device_module(self._device).current_stream(self._device))


class SideStream:
    """A stream of its own, for one thread at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None
        if accelerator.is_accelerator(device):
            self._stream = torch.get_device_module(device).Stream(device)

    @contextmanager
    def entered(self) -> Iterator[Any]:
        """All that this thread queues goes to this stream: torch's, which it gives; None on the CPU."""
        if self._stream is None:
            yield None
            return
        accelerator.use(self._device)
        with torch.get_device_module(self._device).stream(self._stream):
            yield self._stream
