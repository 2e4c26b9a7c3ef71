"""The elected scheduler.

Run as many ``celery beat`` as you like: one is elected, the others stand by. What is scheduled is told by the
scheduler that ``dq_beat_scheduler`` names, which this one wraps; when each entry ran last is kept in the
broker, so that a new leader goes on where the old one ended.

* On ``dq-redis`` a tick is sent **once**. Its id is made of the entry and the time at which it was due, and
  the broker refuses a due time that is not later than the entry's last one.
* On other brokers it is sent at least once, with the same task id each time.
* What was due while nobody led is sent once, at once; further times that were missed are skipped, as Celery
  does.
"""

from __future__ import annotations

import copy
import json
import logging
import socket
import uuid
from datetime import datetime, timedelta, timezone
from typing import Any

import redis
from celery.beat import Scheduler
from celery.utils.imports import symbol_by_name
from kombu.exceptions import OperationalError

from celery_dq.clock import SystemClock
from celery_dq.hooks import WIRES, Wires
from celery_dq.keys import beat_state
from celery_dq.leadership.career import Term
from celery_dq.leadership.office import Office
from celery_dq.singleton.elections import Elections
from celery_dq.worker.broker import broker_client

__all__ = ["ElectedScheduler"]

logger = logging.getLogger(__name__)

#: What beats elect a leader for.
LEADERSHIP = "celery-beat"
#: Seconds between two looks of a beat that stands by.
STAND_BY_S = 0.25
#: The id of a tick is derived from this.
NAMESPACE = uuid.UUID("5f0f3a60-7b1c-4b1e-9d0e-2f6a3f1f8f11")
EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


class Stamps(dict[str, Any]):
    """The same stamp for whatever queue the message is routed to: lane, number, task id."""

    def __init__(self, lane: str, number: int, task_id: str) -> None:
        super().__init__()
        self._stamp = (lane, number, task_id)

    def get(self, queue: str, default: Any = None) -> Any:
        """The stamp for `queue`."""
        return self._stamp


class ElectedScheduler(Scheduler):
    """Ticks only while it leads. A Celery scheduler: hand it to ``celery beat -S``."""

    def __init__(self, app: Any, *args: Any, **kwargs: Any) -> None:
        connection = app.connection_for_write()
        wires = connection.transport_options.get(WIRES)
        if not isinstance(wires, Wires):
            raise TypeError("celery_dq.setup(app) was not called: ElectedScheduler needs the dq_* settings")
        self._options = wires.options
        self._on_dq = str(connection.transport_cls).startswith("dq-")
        inner = symbol_by_name(self._options.beat_scheduler)
        self._inner: Any = inner(app, *args, **kwargs)
        self._send = self._inner.apply_async
        self._inner.apply_async = self.apply_async
        self.app = app
        self._token = 0
        session_s = self._options.election_session_us / 1e6
        make_client = (lambda: broker_client(app, session_s / 6)) if self._on_dq else None
        self._state: Any = None if make_client is None else make_client()
        self._elections = Elections(self._options, f"beat@{socket.gethostname()}", make_client)
        self.office = Office(self._elections.candidate(LEADERSHIP), Beat(), clock=SystemClock())
        if not kwargs.get("lazy"):
            self.office.open()

    # -- what Celery's beat asks

    def tick(self, *args: Any, **kwargs: Any) -> float:
        """Send what is due, if this one leads. Returns the seconds until the next look."""
        self.office.open()
        term = self.office.term
        if term is None or not term.firm:
            return STAND_BY_S
        try:
            if term.token != self._token:
                self._take_over()
                self._token = term.token
                logger.info("This beat leads, token %d.", term.token)
            wait: float = self._inner.tick(*args, **kwargs)
        except (redis.RedisError, OperationalError, OSError) as error:
            logger.warning("The tick waits for the broker: %s", error)
            return STAND_BY_S * 4
        return min(wait, max(self.max_interval or 5.0, STAND_BY_S))

    def apply_async(self, entry: Any, producer: Any = None, advance: bool = True, **kwargs: Any) -> Any:
        """Send one entry, under an id that is the same whoever sends it."""
        due_us = self._due_us(entry)
        task_id = str(uuid.uuid5(NAMESPACE, f"{self._options.environment}/{entry.name}/{due_us}"))
        options = {**(entry.options or {}), "task_id": task_id}
        if self._on_dq:
            options["dq_stamps"] = Stamps(f"beat:{entry.name}", due_us, task_id)
        ticked = copy.copy(entry)
        ticked.options = options
        result = self._send(ticked, producer=producer, advance=advance, **kwargs)
        self._remember(entry.name)
        return result

    @property
    def schedule(self) -> Any:
        """The entries of the scheduler that is wrapped."""
        return self._inner.schedule

    @schedule.setter
    def schedule(self, schedule: Any) -> None:
        self._inner.schedule = schedule

    @property
    def max_interval(self) -> Any:
        """The longest time between two looks."""
        return self._inner.max_interval

    @max_interval.setter
    def max_interval(self, seconds: Any) -> None:
        self._inner.max_interval = seconds

    @property
    def info(self) -> str:
        """For the banner."""
        return f"    . elected -> {self._inner.info.strip()}" if self._inner.info else "    . elected"

    def should_sync(self) -> Any:
        """Whether the wrapped scheduler wants to save."""
        return self._inner.should_sync()

    def sync(self) -> None:
        """Save what the wrapped scheduler saves."""
        self._inner.sync()

    def _do_sync(self) -> None:
        self._inner._do_sync()

    def close(self) -> None:
        """Hand over, and stop."""
        self.office.close(5.0, "the beat stops")
        self._elections.close()
        self._inner.close()

    # -- shared state

    @property
    def _state_key(self) -> str:
        return beat_state(self._options.environment, self._options.key_prefix)

    def _due_us(self, entry: Any) -> int:
        """When the entry was due: a new leader finds the same time, however late it is."""
        schedule = entry.schedule
        due = schedule.now() + (schedule.remaining_estimate(entry.last_run_at) or timedelta())
        if due.tzinfo is None:
            due = due.replace(tzinfo=timezone.utc)
        # To the hundredth of a second: what now() does between the two calls must not show.
        hundredths: float = (due - EPOCH) / timedelta(milliseconds=10)
        return round(hundredths) * 10_000

    def _remember(self, name: str) -> None:
        if self._state is not None:
            entry = self._inner.schedule.get(name)
            if entry is not None and entry.last_run_at is not None:
                told = {"at": entry.last_run_at.isoformat(), "runs": entry.total_run_count}
                self._state.hset(self._state_key, name, json.dumps(told))

    def _take_over(self) -> None:
        """Go on where the last leader ended."""
        if self._state is None:
            return
        for field, value in self._state.hgetall(self._state_key).items():
            entry = self._inner.schedule.get(field.decode() if isinstance(field, bytes) else field)
            if entry is not None:
                told = json.loads(value)
                entry.last_run_at = datetime.fromisoformat(told["at"])
                entry.total_run_count = int(told["runs"])
        # The heap of Celery's scheduler knows the old times.
        self._inner._heap = None


class Beat:
    """The duties of a leading beat: none but to be it; :meth:`ElectedScheduler.tick` does the work."""

    def floor(self) -> int:
        """No token is known elsewhere."""
        return 0

    def serve(self, term: Term) -> None:
        """Lead until the end of the term."""
        term.inaugurated()
        while not term.wait(1.0):
            continue

    def trust(self, term: Term, until: float) -> None:
        """The tick asks the term."""

    def abort(self, term: Term) -> None:
        """A tick is short, and the broker refuses it if somebody else has sent it."""
