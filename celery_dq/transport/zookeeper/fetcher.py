"""Takes items from the queues and tells what became of them, in a thread (or greenlet) of its own.

A worker's event loop never waits for ZooKeeper: the fetcher does. One round tells the broker what there is to
tell, and takes as much as the prefetch counts allow; both are on their way at the same time.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kazoo.exceptions import KazooException, NodeExistsError, NoNodeError

from celery_dq.clock import Clock
from celery_dq.errors import ZooKeeperUnreachable
from celery_dq.transport.zookeeper.hand import RETURNING, Hand, Held, Verb
from celery_dq.transport.zookeeper.record import BATCH_BYTES
from celery_dq.transport.zookeeper.source import Source
from celery_dq.transport.zookeeper.talk import Begun, Talk
from celery_dq.zookeeper.session import State
from celery_dq.zookeeper.transaction import Step, create, delete, set_data

logger = logging.getLogger(__name__)

#: Seconds between two looks at everything, in case a watch got lost.
LOOK_AROUND_S = 10.0
#: Seconds between two looks at what transient queues left behind.
SWEEP_S = 60.0
#: Messages that one request tells of at most.
LARGEST_TELLING = 100
#: Seconds that whoever closes waits until the broker was told everything.
FLUSH_S = 5.0


class Errand(NamedTuple):
    """Somebody waits for one message of a queue that is not consumed."""

    source: Source
    done: Any


class Fetcher:
    """One per consuming connection.

    Arguments:
        talk: with the broker.
        hand: what is held, and what is to be told.
        clock: to wait by.
        room: how many messages a source may take now.
        deliver: called when something lies in an inbox, or the connection has failed.
        sweep: called now and then.
    """

    def __init__(
        self,
        talk: Talk,
        hand: Hand,
        clock: Clock,
        room: Callable[[Source], int],
        deliver: Callable[[], None],
        sweep: Callable[[], None],
    ) -> None:
        self._talk = talk
        self._hand = hand
        self._clock = clock
        self._room = room
        self._deliver = deliver
        self._sweep = sweep
        self._swept_at = clock.monotonic()
        self._sources: list[Source] = []
        self._errands: deque[Errand] = deque()
        handler = talk.client.handler
        self._bell = handler.event_object()
        self._flushed = handler.event_object()
        self._stopping = False
        self._rounds = 0
        self._suspended_at: float | None = None
        self._looked_at = clock.monotonic()
        #: Why the connection is of no use any more.
        self.failure: Exception | None = None
        self._thread: Any = None

    def start(self) -> None:
        """Begin; idempotent."""
        if self._thread is None:
            self._talk.session.listen(self._state_changed)
            self._thread = self._talk.client.handler.spawn(self._run)

    # -- from other threads --------------------------------------------------------

    def ring(self) -> None:
        """There is something to do."""
        self._bell.set()

    def add(self, source: Source) -> None:
        """Consume this source from now on."""
        self._sources = [*self._sources, source]
        self.ring()

    def remove(self, source: Source) -> None:
        """Take nothing more from this source."""
        self._sources = [each for each in self._sources if each is not source]

    def take_now(self, source: Source) -> list[Held]:
        """Take one item from a source that is not consumed; waits for the thread that takes.

        Raises:
            ZooKeeperUnreachable: The connection is of no use any more, or nobody answered in time.
        """
        errand = Errand(source, self._talk.client.handler.event_object())
        self._errands.append(errand)
        self.ring()
        errand.done.wait(2 * self._talk.patience_s)
        if self.failure is not None or not errand.done.is_set():
            raise ZooKeeperUnreachable("Nothing could be taken: ZooKeeper did not answer")
        taken = list(source.inbox)
        source.inbox.clear()
        return taken

    def flush(self, timeout_s: float = FLUSH_S) -> None:
        """Wait until the broker was told all there is, or cannot be told."""
        if self._thread is None or self.failure is not None or not self._talk.holds:
            return
        self._flushed.clear()
        self.ring()
        if self._hand.has_news or not self._idle:
            self._flushed.wait(timeout_s)

    def stop(self) -> None:
        """Tell what there is to tell, and end."""
        if self._thread is None:
            return
        self.flush()
        self._stopping = True
        self._talk.session.unlisten(self._state_changed)
        self.ring()

    def _state_changed(self, state: State) -> None:
        self.ring()

    # -- the thread ------------------------------------------------------------------

    _idle = True

    def _run(self) -> None:
        try:
            self._talk.introduce()
        except (ZooKeeperUnreachable, KazooException) as error:
            self._fail(error)
        while not self._stopping and self.failure is None:
            self._bell.clear()
            self._idle = False
            try:
                more = self._is_connected() and self._round()
            except ZooKeeperUnreachable as error:
                logger.info("A round of fetching from ZooKeeper was cut short: %s.", error)
                more = False
            except Exception as error:
                # Whatever it is, the worker must hear of it: it would starve in silence.
                logger.exception("Fetching from ZooKeeper failed.")
                self._fail(error)
                break
            self._idle = True
            if not self._hand.has_news:
                self._flushed.set()
            if not more and not self._stopping:
                self._bell.wait(self._patience_s())
        self._flushed.set()

    def _fail(self, error: Exception) -> None:
        self.failure = error
        self._hand.drop_everything()
        self._deliver()

    def _is_connected(self) -> bool:
        talk = self._talk
        if talk.is_over:
            self._fail(
                ZooKeeperUnreachable(
                    f"The session with ZooKeeper at {talk.session.hosts} has expired: what was held is "
                    "served again"
                )
            )
            return False
        if talk.holds:
            self._suspended_at = None
            return True
        now = self._clock.monotonic()
        if self._suspended_at is None:
            self._suspended_at = now
        elif now - self._suspended_at > talk.session.timeout_s:
            # Nobody tells us so, but by now others have what we hold.
            self._fail(
                ZooKeeperUnreachable(
                    f"ZooKeeper at {talk.session.hosts} has been away for a session: connecting anew"
                )
            )
        return False

    def _patience_s(self) -> float:
        if self._suspended_at is not None:
            return 0.1
        waits = [wait for wait in (source.next_look_s() for source in self._sources) if wait is not None]
        return min([*waits, LOOK_AROUND_S])

    def _round(self) -> bool:
        now = self._clock.monotonic()
        if now - self._looked_at > LOOK_AROUND_S:
            self._looked_at = now
            for source in self._sources:
                source.look_again()
        if now - self._swept_at > SWEEP_S:
            self._swept_at = now
            self._sweep()
        said, begun = self._begin_telling()
        more = False
        try:
            while self._errands:
                errand = self._errands[0]
                errand.source.turn(self._talk, 1)
                self._errands.popleft()
                errand.done.set()
            sources, self._rounds = self._sources, self._rounds + 1
            first = self._rounds % len(sources) if sources else 0
            for source in [*sources[first:], *sources[:first]]:
                more |= source.turn(self._talk, self._room(source))
                if source.inbox:
                    self._deliver()
        finally:
            self._end_telling(said, begun)
        return more or self._hand.has_news

    # -- telling -----------------------------------------------------------------------

    def _begin_telling(self) -> tuple[Sequence[tuple[Verb, Held]], Begun | None]:
        said = self._hand.take(LARGEST_TELLING, BATCH_BYTES)
        if not said or said[0][1].doubtful:
            return said, None
        return said, self._talk.begin([step for verb, held in said for step in _telling(verb, held)])

    def _end_telling(self, said: Sequence[tuple[Verb, Held]], begun: Begun | None) -> None:
        if not said:
            return
        rest = list(said)
        try:
            if begun is not None and self._talk.refused(begun) is None:
                self._told(rest)
                return
            while rest:
                self._tell_one(*rest[0])
                self._told([rest.pop(0)])
        except ZooKeeperUnreachable:
            self._hand.untold(rest)
            raise

    def _told(self, said: Sequence[tuple[Verb, Held]]) -> None:
        had_suspect = self._hand.has_suspect
        for _, held in said:
            self._hand.told(held)
        # What was passed over because of it may be taken now.
        is_clear = had_suspect and not self._hand.has_suspect
        returned = {held.nodes for verb, held in said if verb in RETURNING}
        for source in self._sources:
            if is_clear or source.nodes in returned:
                # Our own locks are not watched.
                source.look_again()

    def _tell_one(self, verb: Verb, held: Held) -> None:
        """Tell of one message that could not be told of with the others, or of which we do not know."""
        talk = self._talk
        stat = talk.wait(talk.client.exists_async(held.lock))
        if stat is None or stat.ephemeralOwner != talk.session_id:
            # It was told; what is there now is somebody else's.
            return
        refusal = talk.refused(talk.begin(_telling(verb, held)))
        if refusal is None:
            return
        if verb is Verb.GIVE_UP and isinstance(refusal.error, NodeExistsError):
            # A dead letter of that id lies there already; names of items are never used twice.
            message_id, letter = held.letter
            held.letter = f"{message_id}~{held.name[-10:]}", letter
            self._tell_one(verb, held)
            return
        if verb is Verb.BURY and isinstance(refusal.error, NodeExistsError):
            # One of that name was buried before.
            self._tell_one(Verb.ACK, held)
            return
        if not isinstance(refusal.error, NoNodeError):
            raise refusal.error
        if refusal.step.kind == "create":
            talk.wait(talk.client.ensure_path_async(refusal.step.path.rpartition("/")[0]))
            self._tell_one(verb, held)
            return
        if held.marked and refusal.step.path == held.nodes.suspect(held.name):
            # Somebody has cleaned up.
            held.marked = False
            self._tell_one(verb, held)
            return
        # A peer that knows no locks has taken the item: that counts as done, but the lock must not stay.
        talk.refused(talk.begin([delete(held.lock)]))
        if held.marked:
            talk.refused(talk.begin([delete(held.nodes.suspect(held.name))]))


def _telling(verb: Verb, held: Held) -> list[Step]:
    unlock = delete(held.lock)
    if verb is Verb.REQUEUE:
        # The same again: the version of the node counts what came back in good order.
        return [set_data(held.item, held.data), unlock]
    if verb is Verb.CRASHED:
        return [unlock]
    away = [delete(held.item), unlock]
    if held.marked:
        away.append(delete(held.nodes.suspect(held.name)))
    if verb is Verb.GIVE_UP:
        message_id, letter = held.letter
        return [create(held.nodes.dead_letter(message_id), letter), *away]
    if verb is Verb.BURY:
        return [create(f"{held.nodes.unreadable}/{held.name}", held.data), *away]
    return away
