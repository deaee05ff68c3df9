"""A TCP proxy in front of the API server that cuts connections in the middle."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from dataclasses import dataclass, field


@dataclass
class DroppingProxy:
    """Passes bytes to `target`; cuts a share of the connections after a random number of bytes, fewer than `bytes`."""

    target: tuple[str, int]
    share: float = 0.25
    bytes: int = 12_000
    seed: int = 0
    connections: int = 0
    cut: int = 0
    _random: random.Random = field(init=False)
    _listener: socket.socket = field(init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def port(self) -> int:
        return self._listener.getsockname()[1]

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            budget = None
            if self._random.random() < self.share:
                budget = self._random.randrange(self.bytes)
                self.cut += 1
            far = socket.create_connection(self.target)
            allowance = _Allowance(budget)
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=_pump, args=(source, sink, allowance), daemon=True).start()


class _Allowance:
    """Bytes that a connection may still carry, both ways together."""

    def __init__(self, budget: int | None) -> None:
        self._budget = budget
        self._lock = threading.Lock()

    def take(self, count: int) -> int:
        if self._budget is None:
            return count
        with self._lock:
            taken = min(count, self._budget)
            self._budget -= taken
            return taken


def _pump(source: socket.socket, sink: socket.socket, allowance: _Allowance) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(16_384):
            allowed = allowance.take(len(data))
            sink.sendall(data[:allowed])
            if allowed < len(data):
                break
    for end in (source, sink):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
        end.close()
