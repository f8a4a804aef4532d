"""An index that is lost in the middle of a build: a proxy that carries some bytes and then none."""

from __future__ import annotations

import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_CHUNK = 1 << 14


class Proxy(socketserver.ThreadingTCPServer):
    """A proxy for HTTPS. After ``budget`` bytes from the servers it closes every connection; a
    ``silent`` one keeps them and sends nothing."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, budget: int, silent: bool) -> None:
        super().__init__(("127.0.0.1", 0), _Connection)
        self.left = budget
        self.silent = silent
        self.gone = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def carries(self, count: int = 0) -> bool:
        """Whether ``count`` more bytes arrive; a silent proxy does not tell."""
        self.left -= count
        if self.left <= 0 and self.silent:
            self.gone.wait()
        return self.left > 0


class _Connection(socketserver.StreamRequestHandler):
    server: Proxy

    def handle(self) -> None:
        asked = self.rfile.readline().split()
        while self.rfile.readline().strip():
            pass
        host, _, port = asked[1].decode("ascii").rpartition(":") if len(asked) > 1 else ("", "", "")
        with suppress(OSError, ValueError):
            if not self.server.carries():
                return
            with socket.create_connection((host, int(port))) as far:
                self.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
                threading.Thread(target=self._send, args=(far,), daemon=True).start()
                while (data := far.recv(_CHUNK)) and self.server.carries(len(data)):
                    self.wfile.write(data)

    def _send(self, far: socket.socket) -> None:
        with suppress(OSError, ValueError):
            while data := self.request.recv(_CHUNK):
                far.sendall(data)


@contextmanager
def proxy(budget: int, silent: bool = False) -> Iterator[Proxy]:
    """A proxy that is gone with the block."""
    with Proxy(budget, silent) as found:
        threading.Thread(target=found.serve_forever, daemon=True).start()
        try:
            yield found
        finally:
            found.gone.set()
            found.shutdown()
