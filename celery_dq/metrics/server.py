"""The HTTP server of the metrics."""

from __future__ import annotations

import contextlib
import os
import socket
import time
import weakref
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import make_wsgi_app

from celery_dq.metrics.collector import make_registry
from celery_dq.shown import shown_logger

logger = shown_logger(__name__)


class _Handler(WSGIRequestHandler):
    #: Seconds that a client may be silent.
    timeout = 10

    def log_message(self, template: str, *args: Any) -> None:
        logger.debug("A request for metrics from %s: %s", self.address_string(), template % args)


def _addresses(host: str, port: int) -> list[Any]:
    try:
        return socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except UnicodeError as exc:  # a part of the name is empty or too long
        raise OSError(f"{host!a} cannot be the name of a host") from exc


class MetricsServer(ThreadingMixIn, WSGIServer):
    """Serves the metrics of an app. It listens from its construction on.

    It must be made in the thread that calls :meth:`serve`: with gevent or eventlet, sockets and locks belong
    to the loop of one thread.

    Args:
        app: A Celery app.
        host: Address to listen on.
        port: Port to listen on; 0 is any free one.

    Raises:
        ConfigurationError: A ``dq_*`` setting cannot be used.
        OSError: The address is taken, or is none of this machine, or no host can have this name.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, app: Any, host: str, port: int) -> None:
        answer = make_wsgi_app(make_registry(app))
        families = _addresses(host, port)
        self.address_family, address = families[0][0], families[0][4]
        super().__init__((str(address[0]), port), _Handler)
        self.set_app(answer)
        self._running = True
        _close_in_children(self)

    def server_bind(self) -> None:
        """Bind the socket, without a look-up of the host's name that may take seconds."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    @property
    def url(self) -> str:
        """The address of the metrics."""
        host = f"[{self.server_name}]" if ":" in self.server_name else self.server_name
        return f"http://{host}:{self.server_port}/metrics"

    def serve(self) -> None:
        """Answer requests, each in a thread or greenlet, until :meth:`stop` is called."""
        # `serve_forever` waits by a selector, which gevent and eventlet may not have replaced.
        while self._running:
            self._answer_next()
        self.server_close()

    def _answer_next(self) -> None:
        try:
            request, address = self.get_request()
        except OSError:
            time.sleep(0.1)  # the process has no file descriptor left
            return
        try:
            self.process_request(request, address)
        except RuntimeError:  # the system allows no more threads
            self.handle_error(request, address)
            self.shutdown_request(request)

    def stop(self) -> None:
        """End :meth:`serve`, from any thread. Does not wait."""
        self._running = False
        with contextlib.suppress(OSError):
            # It wakes the thread that waits for a request.
            socket.create_connection((self.server_name, self.server_port), timeout=1).close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log an error of a request; most often its client has gone."""
        logger.debug("A request for metrics from %s failed", client_address, exc_info=True)


def _close_in_children(server: MetricsServer) -> None:
    """Let no pool child keep the port after the end of its worker."""
    reference = weakref.ref(server)

    def close() -> None:
        inherited = reference()
        if inherited is not None:
            inherited.socket.close()

    os.register_at_fork(after_in_child=close)
