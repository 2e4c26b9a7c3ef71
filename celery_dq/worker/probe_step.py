"""The boot step that keeps the file of ``celery dq alive`` and ``ready``, with ``dq_probe_file``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from celery import signals
from celery.utils.nodenames import node_format

from celery_dq.clock import SystemClock
from celery_dq.context import AppContext
from celery_dq.errors import ConfigurationError
from celery_dq.outage import Outage
from celery_dq.per_process import current_pid, start_of
from celery_dq.probe import Phase, ProbeState, ask_probe
from celery_dq.shown import shown_logger
from celery_dq.worker.bootsteps import ContextStep
from celery_dq.worker.task_events import stops

__all__ = ["ProbeStep"]

logger = shown_logger(__name__)

#: Seconds between two writes.
INTERVAL_S = 2.0


class ProbeStep(ContextStep):
    """Writes the file from the worker's main loop. Without ``dq_probe_file`` it does nothing.

    The timer of the loop calls it. A loop that is blocked, as that of a solo worker by its task, writes
    nothing. While the worker connects, there is no loop; the file then says so.

    Raises:
        ConfigurationError: The file cannot be written.
    """

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def prepare(self, consumer: Any, context: AppContext) -> bool:
        """Write the file for the first time, if the settings name one."""
        setting = context.options.probe_file
        if not setting:
            return False
        self._consumer = consumer
        self._path = Path(node_format(setting, consumer.hostname))
        self._worker: str = consumer.hostname
        self._clock = SystemClock()
        self._timer: Any = None
        self._heartbeat: Any = None
        self._lease_s = 0.0
        self._answered_at: float | None = None
        self._reported_stopping = False
        self._outage = Outage(logger, "probe_file_outage")
        other = self._other_worker()
        if other is not None:
            logger.warning(
                "Workers %s (process %d) and %s (process %d) keep one dq_probe_file, %s. Each hides the "
                "end of the other one: give each a name of its own (-n), and put %%n into the setting.",
                self._worker,
                os.getpid(),
                other.worker,
                other.pid,
                self._path,
                extra={"event": "probe_file_shared", "worker": self._worker, "other": other.worker},
            )
        try:
            self._state("connecting").write(self._path)
        except OSError as exc:
            raise ConfigurationError(
                f"dq_probe_file = {setting!r} cannot be written ({exc.strerror or exc}): name a "
                "file in a folder that the worker may write to"
            ) from exc
        signals.worker_shutdown.connect(self._remove)
        return True

    def start(self, consumer: Any) -> None:
        """Write the file from now on at each turn of the timer: the worker consumes."""
        context = getattr(consumer.connection.transport, "context", None)
        identity = getattr(context, "identity", None)
        if identity is not None:
            self._heartbeat, self._lease_s = identity.threads, identity.lease_s
            self._answered_at = self._clock.monotonic()
            self._heartbeat.add_check(self._note_answer)
        self._write("consuming")
        self._timer = consumer.timer.call_repeatedly(INTERVAL_S, self._write, ("consuming",))

    def stop(self, consumer: Any) -> None:
        """The connection is lost, or the worker stops: no loop turns from now on."""
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
        if self._heartbeat is not None:
            self._heartbeat.remove_check(self._note_answer)
            self._heartbeat = None
        self._write("stopping" if stops(consumer) else "connecting")

    def _note_answer(self, now: float) -> None:
        self._answered_at = now
        # A task of a solo worker blocks the loop, but not this thread.
        if stops(self._consumer) and not self._reported_stopping:
            self._write("stopping")

    def _state(self, phase: Phase) -> ProbeState:
        now = self._clock.monotonic()
        pid = os.getpid()
        return ProbeState(self._worker, pid, phase, now, self._answered_at, self._lease_s, start_of(pid))

    def _write(self, phase: Phase) -> None:
        self._reported_stopping = phase == "stopping"
        try:
            self._state(phase).write(self._path)
        except OSError as exc:
            self._outage.began(
                "Worker %s cannot write dq_probe_file %s (%s). It goes on, and probes will call it dead.",
                self._worker,
                self._path,
                exc,
            )
        else:
            self._outage.over("Worker %s writes dq_probe_file %s again.", self._worker, self._path)

    def _remove(self, **_: Any) -> None:
        if self._other_worker() is None:
            self._path.unlink(missing_ok=True)

    def _other_worker(self) -> ProbeState | None:
        """Return the state of the worker that has written the file last; None if it is this one, or is gone.

        Two workers of one host may have the same name.
        """
        try:
            other = ProbeState.read(self._path)
        except (OSError, ValueError, TypeError):
            return None
        is_other = other.pid != current_pid() and ask_probe("alive", self._path).ok
        return other if is_other else None
