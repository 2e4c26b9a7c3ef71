"""A TCP proxy that drops or delays chosen requests and answers."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType


class Proxy:
    """Forwards to a port of 127.0.0.1, with one thread per direction.

    Args:
        port: Port of the server.
    """

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = []
        #: The answer to a request that contains these bytes is dropped, and its connection cut.
        self.drop_answers_to: bytes = b""
        self.drops_left = 0
        self.dropped = 0
        #: A request that contains these bytes is not forwarded, and its connection is cut.
        self.cut_requests: bytes = b""
        self.cuts_left = 0
        self.cut = 0
        #: Sent to the client before its connection is cut.
        self.last_words = b""
        #: Number of requests; those that a client sends in one write are one.
        self.requests = 0
        #: How many requests are forwarded before the next one is cut, or its answer dropped; None: all are.
        self.requests_left: int | None = None
        self.drops_answer = False
        #: The answer to a request that contains these bytes is forwarded only after `release_answers` is set.
        self.hold_answers_to: bytes = b""
        self.holds_left = 0
        self.held = 0
        self.release_answers = threading.Event()
        #: A request that contains these bytes is forwarded only after `release_request` is set, once.
        self.delay_request: bytes = b""
        self.release_request = threading.Event()
        #: After a request that contains these bytes, its connection forwards nothing, and stays open.
        self.swallow: bytes = b""
        self.swallows_left = 0
        self.swallowed = 0
        #: While set, no connection forwards anything, in either direction, and all stay open.
        self.black_hole = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                return
            self._sockets += [client, server]
            ends = (client, server, threading.Event(), threading.Event(), threading.Event())
            threading.Thread(target=self._requests, args=ends, daemon=True).start()
            threading.Thread(target=self._answers, args=ends, daemon=True).start()

    def _requests(
        self,
        client: socket.socket,
        server: socket.socket,
        doomed: threading.Event,
        dead: threading.Event,
        held: threading.Event,
    ) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(1 << 20):
                self.requests += 1
                if self.drop_answers_to and self.drop_answers_to in data and self.drops_left > 0:
                    self.drops_left -= 1
                    doomed.set()
                if self.cut_requests and self.cut_requests in data and self.cuts_left > 0:
                    self.cuts_left -= 1
                    self.cut += 1
                    client.sendall(self.last_words)
                    break
                if self.requests_left is not None:
                    self.requests_left -= 1
                    if self.requests_left < 0:
                        self.requests_left = None
                        if not self.drops_answer:
                            break
                        doomed.set()
                if self.hold_answers_to and self.hold_answers_to in data and self.holds_left > 0:
                    self.holds_left -= 1
                    held.set()
                if self.delay_request and self.delay_request in data:
                    self.delay_request = b""
                    self.release_request.wait()
                if self.swallow and self.swallow in data and self.swallows_left > 0:
                    self.swallows_left -= 1
                    self.swallowed += 1
                    dead.set()
                if not (self.black_hole.is_set() or dead.is_set()):
                    server.sendall(data)
        self._cut(client, server)

    def _answers(
        self,
        client: socket.socket,
        server: socket.socket,
        doomed: threading.Event,
        dead: threading.Event,
        held: threading.Event,
    ) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(1 << 20):
                if doomed.is_set():
                    self.dropped += 1
                    break
                if held.is_set():
                    self.held += 1
                    self.release_answers.wait()
                    held.clear()
                if not (self.black_hole.is_set() or dead.is_set()):
                    client.sendall(data)
        self._cut(client, server)

    @staticmethod
    def _cut(*ends: socket.socket) -> None:
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def url(self, direct: str) -> str:
        """Return the broker URL, through this proxy, of the redis-py URL `direct`."""
        return f"dq-redis://127.0.0.1:{self.port}/{direct.rsplit('/', 1)[1]}"

    def redis_url(self, direct: str) -> str:
        """Return the redis-py URL, through this proxy, of the redis-py URL `direct`."""
        return self.url(direct).removeprefix("dq-")

    def cut_all(self) -> None:
        """Cut all connections through the proxy."""
        sockets, self._sockets = self._sockets, []
        self._cut(*sockets)

    def __enter__(self) -> Proxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release_answers.set()
        self.release_request.set()
        self._cut(self._listener)
        self._listener.close()
        self.cut_all()
