"""A proxy on the loopback that cuts a connection after so many bytes."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress


class CuttingProxy:
    """Passes connections on to a server of this machine.

    counted   bytes since `cut_after`, by side: 'sent' to the server, 'answered' by it
    """

    def __init__(self, port: int) -> None:
        self._to = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self.cut_after("sent", -1)
        threading.Thread(target=self._accept, daemon=True).start()

    def cut_after(self, side: str, count: int, then: Callable[[], object] = lambda: None) -> None:
        """From now on count bytes, and cut the connection once `count` of this side have passed; -1: never.

        The server has worked off what it got before the client notices, and `then` is called in between.
        """
        with self._lock:
            self.counted = {"sent": 0, "answered": 0}
            self._side, self._left, self._then = side, count, then

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(self._to)
            cut = threading.Event()
            for words in (("sent", client, server), ("answered", server, client)):
                threading.Thread(target=self._pump, args=(*words, cut), daemon=True).start()

    def _pump(self, side: str, source: socket.socket, to: socket.socket, cut: threading.Event) -> None:
        """Until an end closes, or the cut."""
        client, server = (source, to) if side == "sent" else (to, source)
        try:
            while data := source.recv(1 << 16):
                if cut.is_set():
                    continue  # answers that the client does not get
                allowed, cuts = self._allowed(side, len(data))
                if cuts:
                    cut.set()  # before the last bytes go: the client gets no answer to them
                to.sendall(data[:allowed])
                if cuts:
                    server.shutdown(socket.SHUT_WR)
                    if side == "sent":
                        return  # the other pump goes on to the server's end
        except OSError:
            pass
        if side == "answered" and cut.is_set():
            self._then()
        for end in (client, server):
            _shut(end, socket.SHUT_RDWR if side == "answered" else socket.SHUT_WR)

    def _allowed(self, side: str, size: int) -> tuple[int, bool]:
        """How many of these bytes may pass, and whether that is the cut."""
        with self._lock:
            cuts = side == self._side and 0 <= self._left <= size
            allowed = self._left if cuts else size
            self.counted[side] += allowed
            if side == self._side and self._left >= 0:
                self._left = -1 if cuts else self._left - size
            return allowed, cuts


def _shut(end: socket.socket, how: int) -> None:
    """Both pumps notice, also one that waits in `recv`."""
    with suppress(OSError):
        end.shutdown(how)
