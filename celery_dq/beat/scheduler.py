"""The elected scheduler.

Run as many ``celery beat`` as you like: one is elected, the others stand by. (One for each schedule: beats of
another app, or with another ``dq_beat_name``, have a leader of their own.) What is scheduled is told by the
scheduler that ``dq_beat_scheduler`` names, which this one wraps: Celery's own, its persistent one, the one of
django-celery-beat. When each entry ran last is kept where the broker is (in ZooKeeper, if that holds the
election and the broker is no Redis), so that a new leader goes on where the old one ended.

* On ``dq-redis`` a tick is sent **once**. It is numbered before it is sent, the same for whoever sends it,
  and the broker refuses a number that it has seen: also after a leader that died between sending and saying
  so, and from one that was stopped in the middle of it and goes on an hour later.
* On other brokers it is sent at least once, each time under the same task id.
* What was due while nobody led is sent once, at once; further times that were missed are skipped, as Celery
  does. So is what was due while the broker was away.
"""

from __future__ import annotations

import logging
import signal
import socket
import uuid
from typing import Any

import redis
from celery import signals
from celery.beat import PersistentScheduler, Scheduler, SchedulingError
from celery.utils.imports import load_extension_class_names, symbol_by_name
from kombu.exceptions import OperationalError

from celery_dq.beat.book import Book, Ran, RedisBook, ZooKeeperBook, micros
from celery_dq.clock import SystemClock
from celery_dq.errors import Fenced
from celery_dq.hooks import WIRES, Wires
from celery_dq.keys import beat_state
from celery_dq.leadership.career import Term
from celery_dq.leadership.office import Office
from celery_dq.singleton.elections import Elections
from celery_dq.transport.aliases import TENANT_SCHEMES
from celery_dq.worker.broker import broker_client
from celery_dq.znodes import beat_entry

__all__ = ["ElectedScheduler"]

logger = logging.getLogger(__name__)

#: Seconds between two looks of a beat that stands by.
STAND_BY_S = 0.25
#: Seconds until the next attempt after the broker did not answer.
RETRY_S = 1.0
#: Seconds that a leader may be busy with one tick before somebody else has a try.
STUCK_S = 10.0
#: The id of a tick is derived from this.
NAMESPACE = uuid.UUID("5f0f3a60-7b1c-4b1e-9d0e-2f6a3f1f8f11")
#: For how long the broker remembers the number of an entry's last tick, in milliseconds: a year and a month.
MARKER_TTL_MS = 400 * 24 * 3_600_000
#: What says that the broker, or where the book is, did not answer.
SILENCE = (redis.RedisError, OperationalError, OSError)


def leadership(name: str) -> str:
    """What the beats of the schedule called `name` elect a leader for; no queue has such a name."""
    return f"celery beat of {name}"


class Stamps(dict[str, Any]):
    """The same stamp for whatever queue the message is routed to."""

    def __init__(self, lane: str, number: int, task_id: str) -> None:
        super().__init__()
        self._stamp = (lane, number, task_id, MARKER_TTL_MS)

    def get(self, queue: str, default: Any = None) -> Any:
        """The stamp for `queue`."""
        return self._stamp


class ElectedScheduler(Scheduler):
    """Ticks only while it leads. Hand it to ``celery beat -S``, or to ``celery worker -B --scheduler``.

    Nothing here needs the broker before the first tick.
    """

    def __init__(self, app: Any, *args: Any, **kwargs: Any) -> None:
        connection = app.connection_for_write()
        wires = connection.transport_options.get(WIRES)
        if not isinstance(wires, Wires):
            raise TypeError("celery_dq.setup(app) was not called: ElectedScheduler needs the dq_* settings")
        self._options = wires.options
        #: Two projects on one broker have two schedules, and their entries may have the same names.
        self._name = self._options.beat_name or app.main or "celery"
        self._on_dq = connection.transport_cls in TENANT_SCHEMES
        aliases: Any = load_extension_class_names("celery.beat_schedulers")
        self._inner: Any = symbol_by_name(self._options.beat_scheduler, aliases=dict(aliases))(
            app, *args, **kwargs
        )
        self._send = self._inner.apply_async
        self._inner.apply_async = self.apply_async
        self.app = app
        self.Entry = self._inner.Entry
        self._token = 0
        #: Entries that were not sent after all: the wrapped scheduler must look at them again.
        self._again = False
        #: Ticks that were sent, and that the book could not be told of.
        self._untold: dict[str, tuple[int, Ran]] = {}
        self._busy_since: float | None = None
        self._closed = False
        self._clock = SystemClock()
        session_s = self._options.election_session_us / 1e6
        self._make_client = (lambda: broker_client(app, session_s / 6)) if self._on_dq else None
        who, what = f"beat@{socket.gethostname()}", "celery_dq.beat:ElectedScheduler"
        self._elections = Elections(self._options, who, self._make_client, what)
        signals.beat_embedded_init.connect(self._embedded)
        self._book: Book | None = None
        self._office: Office | None = None

    @property
    def office(self) -> Office:
        """The candidate; made at first need. Raises OSError and the like when the broker is away."""
        if self._office is None:
            election = self._elections.candidate(leadership(self._name))
            self._book = self._make_book()
            self._office = Office(election, Beat(self), clock=self._clock, may_lead=lambda: not self.stuck)
        return self._office

    @property
    def stuck(self) -> bool:
        """Whether a tick takes so long that another beat should have a try."""
        since = self._busy_since
        return since is not None and self._clock.monotonic() - since > STUCK_S

    # -- what Celery's beat asks

    def tick(self, *args: Any, **kwargs: Any) -> float:
        """Send what is due, if this one leads. Returns the seconds until the next look."""
        if self._closed:
            return STAND_BY_S
        try:
            self.office.open()
            term = self.office.term
            if term is None or not term.firm:
                return STAND_BY_S
            self._busy_since = self._clock.monotonic()
            if term.token != self._token:
                self._take_over(term.token)
            wait: float = self._inner.tick(*args, **kwargs)
        except Fenced as error:
            logger.info("%s", error)
            return STAND_BY_S
        except SILENCE as error:
            logger.warning("The tick waits for the broker: %s", error)
            return RETRY_S
        finally:
            self._busy_since = None
        if self._again:
            self._again = False
            # The heap of Celery's scheduler believes that they were sent.
            self._inner._heap = None
            return RETRY_S
        return min(wait, max(self.max_interval or 5.0, STAND_BY_S))

    def apply_async(self, entry: Any, producer: Any = None, advance: bool = True, **kwargs: Any) -> Any:
        """Send one entry, under a number and an id that are the same whoever sends it."""
        if advance:
            self._inner.reserve(entry)
        try:
            number = self._begin(entry)
        except Fenced as error:
            logger.info("%s is not sent: %s", entry.name, error)
            self._put_back(entry)
            return None
        except SILENCE:
            self._put_back(entry)
            raise
        if number is None:
            return None
        ran = self._ran(entry.name)
        lane = f"beat:{self._name}:{entry.name}"
        task_id = str(uuid.uuid5(NAMESPACE, f"{self._options.environment}/{lane}/{number}"))
        options = {**(entry.options or {}), "task_id": task_id}
        if self._on_dq:
            options["dq_stamps"] = Stamps(lane, number, task_id)
        # copy() would call the entry's class, and those of other schedulers are made in other ways.
        sent = object.__new__(type(entry))
        sent.__dict__.update(entry.__dict__, options=options)
        try:
            result = self._send(sent, producer=producer, advance=False, **kwargs)
        except SchedulingError as error:
            if isinstance(error.__context__, SILENCE):
                # Perhaps it was sent. Sending it again changes nothing.
                self._put_back(entry)
            raise
        if ran is not None:
            self._untold[entry.name] = (number, ran)
            self._tell(entry.name)
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
        return not self._closed and self._inner.should_sync()

    def sync(self) -> None:
        """Save what the wrapped scheduler saves."""
        self._inner.sync()

    def _do_sync(self) -> None:
        self._inner._do_sync()

    def close(self) -> None:
        """Hand over, and stop. Celery calls it twice when it is told to stop by a signal."""
        if self._closed:
            return
        self._closed = True
        if self._office is not None:
            self._office.close(5.0, "the beat stops")
        self._elections.close()
        if self._book is not None:
            self._book.close()
        self._inner.close()

    # -- shared state

    def _begin(self, entry: Any) -> int | None:
        """The number of the tick; None when it has run since, or must not be sent by us."""
        term = self.office.term
        if term is None or term.token != self._token:
            raise Fenced("this beat does not lead any more")
        self._tell(entry.name)
        begun = self.book.begin(self._token, entry.name, entry.last_run_at)
        if isinstance(begun, Ran):
            self._put_back(entry)
            entry.last_run_at, entry.total_run_count = begun
            return None
        if not term.firm:
            # That took long. The number stays for whoever leads now.
            raise Fenced("this beat is not sure whether it leads")
        return begun

    def _tell(self, name: str) -> None:
        untold = self._untold.get(name)
        if untold is not None:
            try:
                self.book.done(self._token, name, *untold)
            except (OSError, Fenced) as error:
                # Told before the next tick of this entry. Who comes after us sends this one under its number.
                logger.warning("That %s was sent could not be written down yet: %s", name, error)
                if isinstance(error, OSError):
                    return
            self._untold.pop(name, None)

    def _ran(self, name: str) -> Ran | None:
        entry = self._inner.schedule.get(name)
        return None if entry is None else Ran(entry.last_run_at, int(entry.total_run_count or 0))

    def _put_back(self, entry: Any) -> None:
        self._inner.schedule[entry.name] = entry
        self._again = True

    @property
    def book(self) -> Book:
        """What all beats share."""
        assert self._book is not None, "it comes with the office"
        return self._book

    def _make_book(self) -> Book:
        options, session = self._options, self._elections.session
        state = beat_state(options.environment, self._name, options.key_prefix)
        if self._make_client is not None:
            return RedisBook(self._make_client(), state)
        if session is not None:
            return ZooKeeperBook(session, lambda entry: beat_entry(options.environment, self._name, entry))
        patience_s = options.election_session_us / 6e6
        client = redis.Redis.from_url(
            options.election, socket_timeout=patience_s, socket_connect_timeout=patience_s
        )
        return RedisBook(client, state)

    def _take_over(self, token: int) -> None:
        """Go on where the last leader ended."""
        schedule = self._inner.schedule
        entries = {name: entry.last_run_at for name, entry in schedule.items() if entry.last_run_at}
        # Who keeps the times himself, like django-celery-beat, may know of later ones: a reset by hand.
        ours = type(self._inner) in (Scheduler, PersistentScheduler)
        for name, ran in self.book.adopt(token, entries).items():
            entry = schedule[name]
            if ours or micros(ran.at) > micros(entry.last_run_at):
                entry.last_run_at, entry.total_run_count = ran
        # The heap of Celery's scheduler knows the old times.
        self._inner._heap = None
        self._token = token
        logger.info("This beat leads, token %d.", token)

    def _embedded(self, **_: Any) -> None:
        """``celery worker -B`` ends its beat by SIGTERM, and nobody handles that there: no hand-over."""
        signal.signal(signal.SIGTERM, _leave)


def _leave(number: int, frame: Any) -> None:
    raise SystemExit(0)


class Beat:
    """The duties of a leading beat: none but to be it; :meth:`ElectedScheduler.tick` does the work."""

    def __init__(self, scheduler: ElectedScheduler) -> None:
        self._scheduler = scheduler

    def floor(self) -> int:
        """The highest token that book or beat knows: the election may have moved, or forgotten its own."""
        return max(self._scheduler.book.token(), self._scheduler._token)

    def serve(self, term: Term) -> None:
        """Lead until the end of the term."""
        term.inaugurated()
        while not term.wait(1.0):
            if self._scheduler.stuck:
                term.end("the broker does not answer this beat")

    def trust(self, term: Term, until: float) -> None:
        """The tick asks the term."""

    def abort(self, term: Term) -> None:
        """A tick is short, and the broker refuses it if somebody else has sent it."""
