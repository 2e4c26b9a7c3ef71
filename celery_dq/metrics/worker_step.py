"""The boot step that serves metrics from a worker, with ``dq_metrics_port``."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from celery import bootsteps, signals

from celery_dq.app.api.api import dq_of
from celery_dq.errors import MissingLibrary
from celery_dq.native import leave_green_hub, start_thread, unpatched
from celery_dq.shown import shown_logger

logger = shown_logger(__name__)

#: Seconds to wait for the end of the thread.
STOP_TIMEOUT_S = 2.0


class MetricsStep(bootsteps.StartStopStep):
    """Serves metrics from a native thread of the main process. Without ``dq_metrics_port`` it does nothing.

    The thread uses primitives that gevent and eventlet have not replaced, and its own loop for its requests,
    so that it answers while a task blocks the worker's loop. It answers until the last task has ended.

    Raises:
        MissingLibrary: prometheus-client is not installed.
    """

    # The first children of the pool are forked before there is a socket that they would inherit.
    requires = ("celery.worker.components:Pool",)

    def __init__(self, worker: Any, **kwargs: Any) -> None:
        super().__init__(worker, **kwargs)
        self._server: Any = None
        #: Held while the thread lives.
        self._thread_lock = unpatched("_thread", "allocate_lock")()
        port = dq_of(worker.app).options.metrics.port
        if port is not None and find_spec("prometheus_client") is None:
            raise MissingLibrary.needed_by(f"dq_metrics_port = {port}", "prometheus-client", "metrics")

    def include_if(self, worker: Any) -> bool:
        """Return whether the settings name a port."""
        return dq_of(worker.app).options.metrics.port is not None

    def start(self, worker: Any) -> None:
        """Start the thread, and wait until it listens."""
        # The import needs the extra 'metrics'.
        from celery_dq.metrics.server import MetricsServer

        listens = unpatched("_thread", "allocate_lock")()
        listens.acquire()
        self._thread_lock.acquire()
        # Steps end in the reverse order. Thus `stop` would come before the pool has finished its tasks.
        signals.worker_shutdown.connect(self._stop_server, sender=worker)
        start_thread(self._run, worker, MetricsServer, listens)
        listens.acquire()

    def terminate(self, worker: Any) -> None:
        """End the thread, at a cold shutdown."""
        self._stop_server()

    def _stop_server(self, **_: Any) -> None:
        """End the thread. One that lives when the interpreter ends is killed, which crashes a greenlet."""
        server, self._server = self._server, None
        if server is not None:
            server.stop()
            self._thread_lock.acquire(True, STOP_TIMEOUT_S)

    def _run(self, worker: Any, make: Any, listens: Any) -> None:
        try:
            self._serve(worker, make, listens)
            leave_green_hub()
        finally:
            self._thread_lock.release()

    def _serve(self, worker: Any, make: Any, listens: Any) -> None:
        options = dq_of(worker.app).options.metrics
        try:
            server = self._server = make(worker.app, options.host, options.port)
        except OSError as exc:
            logger.warning(
                "Worker %s serves no metrics: it cannot listen on %s:%s (%s). The worker goes on without; "
                "give each worker of a machine a port of its own, or run one 'celery dq exporter' for all.",
                worker.hostname,
                options.host,
                options.port,
                exc.strerror or exc,
                extra={"event": "metrics_port_unavailable", "port": options.port},
            )
            return
        finally:
            listens.release()
        logger.info(
            "Worker %s serves metrics on %s",
            worker.hostname,
            server.url,
            extra={"event": "metrics_served", "url": server.url},
        )
        server.serve()
