"""The elected scheduler.

Any number of ``celery beat`` processes may run: one is elected, and the others stand by. Each schedule has a
leader: beats of another app, or with another ``dq_beat_name``, elect another one. This scheduler wraps the
scheduler that ``dq_beat_scheduler`` names: Celery's own, its persistent one, or the one of
django-celery-beat. The wrapped scheduler defines the entries. The last run of each entry is stored in the
broker, so that a new leader continues where the old one ended. If ZooKeeper holds the election and the broker
is not Redis, ZooKeeper stores it.

* On ``dq-redis``, a tick is sent **once**. It is numbered before it is sent, and the number is the same for
  every beat. The broker refuses a number that it has seen. This covers a leader that died between sending a
  tick and recording it, and a leader that was stopped while sending and continues within a week.
* On other brokers, a tick is sent at least once, each time with the same task id.
* A tick that was due while no beat was elected, or while the broker was unreachable, is sent once, as soon as
  possible. Further missed times are skipped, as in Celery. The other entries go on while one cannot be sent.
* The state of an entry that leaves the schedule is removed. An entry that comes back counts from its return.

Some wrapped schedulers store the last runs themselves, such as the one of django-celery-beat. Then the later
of both times counts, and the wrapped scheduler saves after every tick, before the next leader is elected. If
the clock of a dead leader was ahead, no interval is delayed, and a crontab by at most a minute. RedBeat is
refused, because it elects its leader by a lock.
"""

from __future__ import annotations

import signal
import socket
import uuid
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from typing import Any, NamedTuple

import redis
from celery import signals
from celery.beat import PersistentScheduler, Scheduler, SchedulingError
from celery.schedules import schedule as interval
from celery.utils.imports import load_extension_class_names, symbol_by_name
from kombu.exceptions import OperationalError

from celery_dq.beat.schedule_store import (
    Known,
    LastRun,
    RedisScheduleStore,
    ScheduleStore,
    ZooKeeperScheduleStore,
    micros,
)
from celery_dq.clock import Clock, SystemClock
from celery_dq.compat.beat_sync import postpone, save_schedule
from celery_dq.context import AppContext
from celery_dq.errors import ConfigurationError, Fenced
from celery_dq.keys import beat_state
from celery_dq.leadership.career import Term
from celery_dq.leadership.elector import LeaderCallbacks, LeaderElector
from celery_dq.leadership.redis_election import broker_client
from celery_dq.options.sections import Options
from celery_dq.outage import Outage
from celery_dq.shown import shown_logger
from celery_dq.singleton.elections import Elections
from celery_dq.transport.aliases import TENANT_SCHEMES
from celery_dq.znodes import BeatNodes

__all__ = ["ElectedScheduler"]

logger = shown_logger(__name__)

#: How far in the future the last run of an entry with fixed times (a crontab) may be. The clocks of machines
#: differ, and to accept only an earlier time would repeat a run.
CLOCK_DIFFERENCE = timedelta(seconds=60)
#: The namespace of the UUIDs of ticks.
NAMESPACE = uuid.UUID("5f0f3a60-7b1c-4b1e-9d0e-2f6a3f1f8f11")
#: Milliseconds for which the broker keeps the number of an entry's last tick. A beat that was stopped while
#: it sent this tick may continue so much later. Without a limit, markers of deleted entries would stay.
MARKER_TTL_MS = 7 * 24 * 3_600_000


class StaleEntry(Exception):
    """The wrapped scheduler considers an entry due because it has not read the entry's last run.

    Args:
        name: Name of the entry.
        ran: Its last run.
    """

    def __init__(self, name: str, ran: LastRun) -> None:
        super().__init__(name)
        self.name = name
        self.ran = ran


class Due(NamedTuple):
    """An entry whose tick has a number.

    Attributes:
        entry: The entry.
        before: Its last run before the tick.
        following: The entry after the tick, for the wrapped scheduler.
        number: Number of the tick.
    """

    entry: Any
    before: LastRun
    following: Any
    number: int


def wrapped_class(name: str) -> Any:
    """Return the class that ``dq_beat_scheduler`` names.

    Raises:
        ConfigurationError: The scheduler cannot be wrapped.
    """
    aliases: Any = load_extension_class_names("celery.beat_schedulers")
    kind: Any = symbol_by_name(name, aliases=dict(aliases))
    if any(base.__module__.partition(".")[0] == "redbeat" for base in kind.__mro__):
        raise ConfigurationError(
            f"dq_beat_scheduler = {name!r} cannot be wrapped: RedBeat elects a leader with its own lock, and "
            "counts an entry as run before it is sent. Use RedBeat alone (celery beat -S "
            "redbeat.RedBeatScheduler), or set dq_beat_scheduler to 'celery.beat:Scheduler' or 'django'"
        )
    return kind


def last_run(entry: Any) -> LastRun:
    """Return the last run of an entry."""
    return LastRun(entry.last_run_at, int(entry.total_run_count or 0))


def set_last_run(entry: Any, ran: LastRun) -> None:
    """Set the last run of an entry.

    An entry of django-celery-beat also has these values in its database row, and only the row is saved.
    """
    entry.last_run_at, entry.total_run_count = ran
    model = getattr(entry, "model", None)
    if model is not None:
        model.last_run_at, model.total_run_count = ran


def latest_run(entry: Any, wall: float) -> datetime:
    """Return the latest plausible last run of an entry.

    An interval counts from the last run. With a last run in the future, the entry would wait until the local
    clock has reached that time.

    Args:
        entry: The entry.
        wall: The current time, seconds since 1970.
    """
    now = datetime.fromtimestamp(wall, timezone.utc)
    latest = now if isinstance(entry.schedule, interval) else now + CLOCK_DIFFERENCE
    return latest if entry.last_run_at.tzinfo is not None else latest.replace(tzinfo=None)


def task_id_of(environment: str, entry_key: str, number: int) -> str:
    """Return the task id of tick `number` of an entry."""
    return str(uuid.uuid5(NAMESPACE, f"{environment}/{entry_key}/{number}"))


class TickStamps(dict[str, Any]):
    """A mapping with the same stamp for every queue, so that any route of the message finds it.

    Args:
        entry_key: The producer sequence of the entry.
        number: Number of the tick.
        task_id: The task id of the tick.
    """

    def __init__(self, entry_key: str, number: int, task_id: str) -> None:
        super().__init__()
        self._stamp = (entry_key, number, task_id, MARKER_TTL_MS)

    def get(self, queue: str, default: Any = None) -> Any:
        """Return the stamp, for any `queue`."""
        return self._stamp


#: Seconds between two checks of a beat that stands by.
STAND_BY_S = 0.25
#: Seconds until the next attempt after a request without an answer.
RETRY_S = 1.0
#: Seconds until the next attempt to send an entry that could not be sent: the first and the longest pause.
PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
#: Maximum seconds of one tick before the leader resigns, so that another beat tries.
STUCK_S = 10.0
#: Errors of requests to the broker or the schedule store that got no answer.
SILENCE = (redis.RedisError, OperationalError, OSError)


def leadership(name: str) -> str:
    """Return the name of the leadership of the schedule `name`; no queue can have this name."""
    return f"celery beat of {name}"


def schedule_name(app: Any, options: Options) -> str:
    """Return the name of the app's schedule."""
    # Two projects on one broker have two schedules, and their entries may have the same names.
    return options.beat_name or app.main or "celery"


class ElectedScheduler(Scheduler):
    """A scheduler that ticks only while it leads.

    Use it with ``celery beat -S`` or ``celery worker -B --scheduler``. It sends no request to the broker
    before the first tick.

    Args:
        app: The Celery app; ``celery_dq.setup(app)`` must have been called.
        *args: Passed to the wrapped scheduler.
        clock: Wall and monotonic time.
        **kwargs: Passed to the wrapped scheduler.

    Raises:
        ConfigurationError: ``dq_beat_scheduler`` names a scheduler that cannot be wrapped.
        TypeError: ``celery_dq.setup(app)`` was not called.
    """

    def __init__(self, app: Any, *args: Any, clock: Clock | None = None, **kwargs: Any) -> None:
        connection = app.connection_for_write()
        context = AppContext.of(connection)
        if context is None:
            raise TypeError("celery_dq.setup(app) was not called: ElectedScheduler needs the dq_* settings")
        self._options = context.options
        self._name = schedule_name(app, self._options)
        self._on_dq = connection.transport_cls in TENANT_SCHEMES
        kind = wrapped_class(self._options.beat_scheduler)
        self._inner: Any = kind(app, *args, **kwargs)
        #: Whether the wrapped scheduler stores the last runs itself, so that a later one may be set by hand.
        self._keeps_times = kind not in (Scheduler, PersistentScheduler)
        self._send = self._inner.apply_async
        self._inner.apply_async = self.apply_async
        self._reserve = self._inner.reserve
        self._inner.reserve = self.reserve
        self._populate_heap = self._inner.populate_heap
        self._inner.populate_heap = self.populate_heap
        self.app = app
        self.Entry = self._inner.Entry
        self._token = 0
        #: The entry whose tick has a number and is not sent yet.
        self._due: Due | None = None
        #: The ticks since the last :meth:`_settle`, and whether each was sent.
        self._ticked: list[tuple[Due, bool]] = []
        #: The names of the entries that the store knows.
        self._names: set[str] = set()
        #: When an entry that could not be sent is tried again (monotonic), and the pause after that, by name.
        self._postponed: dict[str, tuple[float, float]] = {}
        self._busy_since: float | None = None
        self._outage = Outage(logger, "beat_outage")
        self._closed = False
        self._clock: Clock = clock or SystemClock()
        session_s = self._options.election_session_us / 1e6
        self._make_client = (lambda: broker_client(app, session_s / 6)) if self._on_dq else None
        who, what = f"beat@{socket.gethostname()}", "celery_dq.beat:ElectedScheduler"
        self._elections = Elections(self._options, who, self._make_client, what)
        signals.beat_embedded_init.connect(self._embedded)
        self._schedule_store: ScheduleStore | None = None
        self._elector: LeaderElector | None = None

    @property
    def elector(self) -> LeaderElector:
        """The candidate of this beat, created at the first use.

        Raises:
            OSError: The broker does not answer.
        """
        if self._elector is None:
            election = self._elections.candidate(leadership(self._name))
            self._schedule_store = self._make_schedule_store()
            self._elector = LeaderElector(
                election, BeatCallbacks(self), clock=self._clock, may_lead=lambda: not self.stuck
            )
        return self._elector

    @property
    def stuck(self) -> bool:
        """Whether the current tick takes so long that another beat should try."""
        since = self._busy_since
        return since is not None and self._clock.monotonic() - since > STUCK_S

    # -- called by Celery's beat

    def tick(self, *args: Any, **kwargs: Any) -> float:
        """Send the due entries if this beat leads; return the seconds until the next call."""
        if self._closed:
            return STAND_BY_S
        try:
            self.elector.open()
            term = self.elector.term
            if term is None or not term.is_firm:
                return STAND_BY_S
            listed = self._inner.old_schedulers
            if term.token != self._token:
                self._take_over(term.token)
            elif listed is not None and set(listed) != self._names:
                self._follow(listed)
            # A take-over of many entries may take long, and each of its requests is bounded.
            self._busy_since = self._clock.monotonic()
            wait: float = self._inner.tick(*args, **kwargs)
            if not self._ticked or all(sent for _, sent in self._ticked):
                self._outage.over("Beat %s gets answers again.", self._name)
        except Fenced as error:
            logger.info(
                "Beat %s sends no tick: %s.",
                self._name,
                error,
                extra={"event": "beat_fenced"},
            )
            wait = STAND_BY_S
            self._refill()
        except StaleEntry as error:
            self._correct(error)
            wait = STAND_BY_S
        except SILENCE as error:
            self._outage.began(
                "Beat %s gets no answer from its broker or election (%s); no tick is sent until it does.",
                self._name,
                error,
            )
            wait = RETRY_S
            self._refill()
        finally:
            self._busy_since = None
        if self._settle():
            return STAND_BY_S
        return min(wait, max(self.max_interval or 5.0, STAND_BY_S))

    def populate_heap(self, *args: Any, **kwargs: Any) -> None:
        """Let the wrapped scheduler sort its entries; one that could not be sent is not before the others."""
        self._populate_heap(*args, **kwargs)
        now = self._clock.monotonic()
        waits = {name: until - now for name, (until, _) in self._postponed.items() if until > now}
        postpone(self._inner, waits)

    def reserve(self, entry: Any) -> Any:
        """Number the tick of an entry, and let the wrapped scheduler count the entry as run."""
        number = self._begin(entry)
        before = last_run(entry)
        following = self._reserve(entry)
        self._due = Due(entry, before, following, number)
        return following

    def apply_async(self, entry: Any, producer: Any = None, advance: bool = True, **kwargs: Any) -> Any:
        """Send one entry, with a number and a task id that are the same for every beat."""
        if advance or self._due is None or self._due.entry is not entry:
            self.reserve(entry)
        due = self._due
        assert due is not None
        entry_key = f"beat:{self._name}:{entry.name}"
        task_id = task_id_of(self._options.environment, entry_key, due.number)
        options = {**(entry.options or {}), "task_id": task_id}
        if self._on_dq:
            options["dq_stamps"] = TickStamps(entry_key, due.number, task_id)
        # copy() would call the entry's class, whose arguments differ between schedulers.
        sent = object.__new__(type(entry))
        sent.__dict__.update(entry.__dict__, options=options)
        try:
            result = self._send(sent, producer=producer, advance=False, **kwargs)
        except SchedulingError as error:
            # The tick may have been sent. To send it again with the same number changes nothing.
            self._is_over(due, not isinstance(error.__context__, SILENCE))
            raise
        self._record(due)
        self._is_over(due, True)
        return result

    @property
    def schedule(self) -> Any:
        """The entries of the wrapped scheduler."""
        return self._inner.schedule

    @schedule.setter
    def schedule(self, schedule: Any) -> None:
        self._inner.schedule = schedule

    @property
    def max_interval(self) -> Any:
        """The maximum seconds between two ticks."""
        return self._inner.max_interval

    @max_interval.setter
    def max_interval(self, seconds: Any) -> None:
        self._inner.max_interval = seconds

    @property
    def info(self) -> str:
        """The text for Celery's start-up banner."""
        return f"    . elected -> {self._inner.info.strip()}" if self._inner.info else "    . elected"

    def should_sync(self) -> Any:
        """Whether the wrapped scheduler should save; only a leader may, or it would overwrite later times."""
        return not self._closed and self._leads() and self._inner.should_sync()

    def sync(self) -> None:
        """Let the wrapped scheduler save."""
        self._inner.sync()

    def _do_sync(self) -> None:
        save_schedule(self._inner)

    def close(self) -> None:
        """Hand over and stop. Celery calls this twice after a signal."""
        if self._closed:
            return
        self._closed = True
        try:
            self._settle()
            if self._leads():
                # The next leader reads the saved times.
                self._inner.sync()
        finally:
            if self._elector is not None:
                self._elector.close(5.0, "the beat stops")
            self._elections.close()
            if self._schedule_store is not None:
                self._schedule_store.close()
            self._inner.close()

    # -- shared state

    def _leads(self) -> bool:
        term = self._elector.term if self._elector is not None else None
        return term is not None and term.token == self._token

    def _begin(self, entry: Any) -> int:
        """Return the number of the entry's tick.

        Raises:
            Fenced: This beat does not lead, or is not sure of it.
            StaleEntry: The entry has run later than the wrapped scheduler knows.
            OSError: The store did not answer.
        """
        term = self.elector.term
        if term is None or term.token != self._token:
            raise Fenced(f"{entry.name} is not sent: this beat does not lead")
        begun = self.schedule_store.begin(self._token, entry.name, entry.last_run_at)
        if isinstance(begun, LastRun):
            raise StaleEntry(entry.name, begun)
        if not term.is_firm:
            # The answer came late. The number stays pending for the next leader.
            raise Fenced(f"{entry.name} is not sent: this beat is not sure whether it leads")
        return begun

    def _record(self, due: Due) -> None:
        """Record in the store that a tick was sent."""
        name = due.entry.name
        try:
            self.schedule_store.done(self._token, name, due.number, last_run(due.following))
        except (OSError, Fenced) as error:
            # A new leader would send the tick again, under the same number.
            logger.warning(
                "Beat %s could not record that tick %s of %s was sent (%s); the next tick of the entry "
                "records it. A new leader may send the tick again before, under the same number.",
                self._name,
                due.number,
                name,
                error,
                extra={"event": "beat_tick_unrecorded"},
            )

    def _is_over(self, due: Due, sent: bool) -> None:
        self._due = None
        self._ticked.append((due, sent))

    def _settle(self) -> bool:
        """Update the wrapped scheduler after its tick; return whether a tick must be sent again.

        This must not happen during the tick, because reading the schedule may load all entries again.
        """
        if self._due is not None:
            # A signal has interrupted the sending of the tick.
            self._is_over(self._due, False)
        ticked, self._ticked = self._ticked, []
        for due, sent in ticked:
            name = due.entry.name
            _, pause_s = self._postponed.pop(name, (0.0, PAUSE_S))
            if not sent:
                set_last_run(due.entry, due.before)
                again_at = self._clock.monotonic() + pause_s
                self._postponed[name] = again_at, min(pause_s * 2, LONGEST_PAUSE_S)
            schedule = self._inner.schedule
            now = schedule.get(name)
            # An entry that was loaded again in the meantime is newer than both.
            if not self._keeps_times or now is due.entry or now is due.following:
                schedule[name] = due.following if sent else due.entry
        if ticked and self._keeps_times and self._leads():
            self._inner.sync()
        again = not all(sent for _, sent in ticked)
        if again:
            self._refill()
        return again

    def _correct(self, stale: StaleEntry) -> None:
        entry = self._inner.schedule.get(stale.name)
        if entry is not None:
            set_last_run(entry, stale.ran)
        self._refill()

    def _refill(self) -> None:
        """Let the wrapped scheduler sort its entries again."""
        self._inner.old_schedulers = None

    @property
    def schedule_store(self) -> ScheduleStore:
        """The store of the state that all beats share."""
        assert self._schedule_store is not None, "the store is created with the candidate"
        return self._schedule_store

    def _make_schedule_store(self) -> ScheduleStore:
        options, session = self._options, self._elections.session
        state = beat_state(options.environment, self._name, options.key_prefix)
        if self._make_client is not None:
            return RedisScheduleStore(self._make_client(), state)
        if session is not None:
            return ZooKeeperScheduleStore(session, BeatNodes(options.environment, self._name))
        patience_s = options.election_session_us / 6e6
        client = redis.Redis.from_url(
            options.election, socket_timeout=patience_s, socket_connect_timeout=patience_s
        )
        return RedisScheduleStore(client, state)

    def _take_over(self, token: int) -> None:
        """Take over the last runs from the previous leader."""
        schedule = self._inner.schedule
        ahead = self._adopt(token, schedule)
        self.schedule_store.retain(token, set(schedule))
        self._token, self._names = token, set(schedule)
        logger.info("Beat %s leads, token %d.", self._name, token, extra={"event": "beat_leads"})
        if ahead:
            logger.warning(
                "The clock of the last leader of beat %s was ahead of the clock of this machine. The last "
                "runs of %d entries count as runs of now, so that these entries wait no longer than usual. "
                "Synchronize the clocks.",
                self._name,
                ahead,
                extra={"event": "beat_clock_ahead"},
            )

    def _follow(self, listed: Mapping[str, Any]) -> None:
        """Store the entries that have come since the last look, and remove those that are gone."""
        names = set(listed)
        self._adopt(self._token, {name: listed[name] for name in names - self._names})
        self.schedule_store.retain(self._token, names)
        self._names = names
        for name in self._postponed.keys() - names:
            del self._postponed[name]

    def _adopt(self, token: int, schedule: Mapping[str, Any]) -> int:
        """Take over the last runs of entries; return how many the store has in the future."""
        wall = self._clock.wall()
        entries = {
            name: Known(entry.last_run_at, latest_run(entry, wall))
            for name, entry in schedule.items()
            if entry.last_run_at
        }
        ahead = 0
        for name, ran in self.schedule_store.adopt(token, entries).items():
            entry, latest = schedule[name], entries[name].latest
            # A first reading is not a run. Where Django has no time zones, it may be a local time.
            is_ahead = micros(entry.last_run_at) > micros(latest)
            if not self._keeps_times or (
                ran.runs and (is_ahead or micros(ran.at) > micros(entry.last_run_at))
            ):
                set_last_run(entry, ran)
            elif is_ahead:
                set_last_run(entry, LastRun(latest, entry.total_run_count))
            ahead += bool(ran.runs) and ran.at == latest
        self._refill()
        return ahead

    def _embedded(self, **_: Any) -> None:
        """Exit on SIGTERM with a hand-over: ``celery worker -B`` sends it, and Celery installs no handler."""
        signal.signal(signal.SIGTERM, _leave)


def _leave(number: int, frame: Any) -> None:
    raise SystemExit(0)


class BeatCallbacks(LeaderCallbacks):
    """The callbacks of the elector of a beat; :meth:`ElectedScheduler.tick` does the work.

    Each tick checks the term itself. It is short, and the broker refuses one that another beat has sent.
    """

    def __init__(self, scheduler: ElectedScheduler) -> None:
        self._scheduler = scheduler

    def floor(self) -> int:
        """Return the highest token of the store, because the election may be a new one."""
        return self._scheduler.schedule_store.token()

    def serve(self, term: Term) -> None:
        """Lead until the end of the term."""
        term.inaugurated()
        while not term.wait(1.0):
            if self._scheduler.stuck:
                store = self._scheduler.schedule_store.kind
                term.end(
                    f"a tick takes longer than {STUCK_S:g} s: the broker or {store} does not answer this beat"
                )
