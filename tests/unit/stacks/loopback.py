"""A package index on loopback."""

from __future__ import annotations

import http.server
import threading


class Loopback:
    """Answers each path by :meth:`answer`, and keeps what was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.headers: list[dict[str, str]] = []
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.asked.append(self.path)
                server.headers.append(dict(self.headers))
                code, kind, body = server.answer(self.path)
                self.send_response(code)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/simple"
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.02,))
        self.thread.start()

    def answer(self, path: str) -> tuple[int, str, bytes]:
        raise NotImplementedError

    def stop(self) -> None:
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()
