"""A TCP proxy that loses what it is told to lose."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType


class Proxy:
    """Forwards to a port of 127.0.0.1; one thread per direction.

    Arguments:
        port: of the server behind it.
    """

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = []
        #: Requests that hold this lose their answer: the connection is cut once the server has spoken.
        self.drop_answers_to: bytes = b""
        self.drops_left = 0
        self.dropped = 0
        #: A connection on which this was said is dead from then on, and nobody is told.
        self.swallow: bytes = b""
        self.swallows_left = 0
        self.swallowed = 0
        #: Nothing passes, in either direction, and nobody is told.
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
            doomed, dead = threading.Event(), threading.Event()
            ends = (client, server, doomed, dead)
            threading.Thread(target=self._requests, args=ends, daemon=True).start()
            threading.Thread(target=self._answers, args=ends, daemon=True).start()

    def _requests(
        self, client: socket.socket, server: socket.socket, doomed: threading.Event, dead: threading.Event
    ) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(1 << 20):
                if self.drop_answers_to and self.drop_answers_to in data and self.drops_left > 0:
                    self.drops_left -= 1
                    doomed.set()
                if self.swallow and self.swallow in data and self.swallows_left > 0:
                    self.swallows_left -= 1
                    self.swallowed += 1
                    dead.set()
                if not (self.black_hole.is_set() or dead.is_set()):
                    server.sendall(data)
        self._cut(client, server)

    def _answers(
        self, client: socket.socket, server: socket.socket, doomed: threading.Event, dead: threading.Event
    ) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(1 << 20):
                if doomed.is_set():
                    self.dropped += 1
                    break
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
        """The broker URL of what redis-py calls `direct`, through this proxy."""
        return f"dq-redis://127.0.0.1:{self.port}/{direct.rsplit('/', 1)[1]}"

    def cut_all(self) -> None:
        """Cut every connection that goes through."""
        sockets, self._sockets = self._sockets, []
        self._cut(*sockets)

    def __enter__(self) -> Proxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cut(self._listener)
        self._listener.close()
        self.cut_all()
