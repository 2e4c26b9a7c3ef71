"""Elections by ZooKeeper's recipe: the candidate with the lowest sequence leads.

::

    …/candidates/c-<guid>-0000000007    ephemeral; stands for election
    …/epoch                             persistent: the last token, whose, whether it handed over cleanly

Where this departs from the recipe, it is because of what goes wrong there:

* A candidate's creation may succeed while its answer is lost. The node is found again by its GUID and deleted
  before another one is made, and afterwards, because a server may not have known of it.
* A read may be answered by a server that is cut off from its ensemble. So nobody leads who has not
  *written*: acceding and renewing are transactions that check the candidate and the epoch.
* The predecessor is watched by its (empty) list of children: such a watch fires when the node goes, and not
  whenever the leader renews by writing to it.
* kazoo counts requests as signs of life. When renewals go unanswered, the connection is broken by us,
  and so is the next one, if nobody speaks there.
"""

from __future__ import annotations

import contextlib
import json
import threading
import uuid
from collections.abc import Callable
from typing import Any

from kazoo.exceptions import BadVersionError, KazooException, NodeExistsError, NoNodeError

from celery_dq.clock import Clock, SystemClock
from celery_dq.errors import NotElected, ZooKeeperUnreachable
from celery_dq.leadership.election import Accession, Leader
from celery_dq.znodes import LeadershipNodes, serial_order
from celery_dq.zookeeper.session import Session, State

__all__ = ["ZooKeeperElection"]

#: Requests get this share of the session to be answered.
PATIENCE = 1 / 6
#: Renewals unanswered for this share of the session: the server is taken for dead.
DEAD = 1 / 3
#: And once more after this share of it, if the connection that is made then is not answered either.
DEAD_TOO = 1 / 5
#: How often the list of candidates is read anew because it changed while being read.
LOOKS = 20


class ZooKeeperElection:
    """One candidate for one leadership; see :class:`~celery_dq.leadership.election.Election`.

    :param session: may serve many elections.
    :param who: names the candidate for people; a unique part is added.
    """

    def __init__(
        self, session: Session, nodes: LeadershipNodes, who: str, clock: Clock | None = None
    ) -> None:
        self.name = nodes.name
        self.who = f"{who}:{uuid.uuid4().hex[:12]}"
        self._session = session
        self._nodes = nodes
        self._clock: Clock = clock or SystemClock()
        self._guid = uuid.uuid4().hex
        self._node = ""
        self._node_session: int | None = None
        #: The session in which a node of ours may be left whose name we do not know.
        self._left_in: int | None = None
        #: Perhaps another one than the one we know.
        self._has_doubles = False
        self._epoch_version = -1
        self._token = 0
        self._since = 0.0
        self._answered_at = self._dropped_at = 0.0
        self._changed = threading.Event()
        self._bell: Callable[[], None] | None = None
        self._listening = False

    @property
    def session_s(self) -> float:
        """The negotiated session timeout."""
        return self._session.timeout_s

    @property
    def suspended(self) -> bool:
        """Whether the connection is known to be broken."""
        return self._session.state is not State.CONNECTED

    def listen(self, bell: Callable[[], None]) -> None:
        """Call `bell` at every change of the session's state; see the protocol."""
        self._bell = bell

    # -- standing

    def stand(self) -> bool:
        """Become or stay a candidate; see the protocol."""
        self._listen(True)
        for _ in range(LOOKS):
            self._changed.clear()
            node = self._candidate()
            line = self._line()
            if node not in line:
                self._node = ""
                continue
            line = self._without_doubles(line)
            place = line.index(node)
            if place == 0:
                return True
            ahead = self._nodes.candidate(line[place - 1])
            try:
                self._ask(lambda client, path=ahead: client.get_children_async(path, watch=self._on_gone))
            except NoNodeError:
                continue
            return False
        return False

    def wait(self, timeout_s: float) -> None:
        """Wait until the predecessor has gone or the connection has changed."""
        self._changed.wait(timeout_s)

    def wake(self) -> None:
        """End a wait."""
        self._changed.set()

    def _listen(self, wanted: bool) -> None:
        if wanted != self._listening:
            self._listening = wanted
            (self._session.listen if wanted else self._session.unlisten)(self._on_state)

    def _on_gone(self, event: Any) -> None:
        self._changed.set()

    def _on_state(self, state: State) -> None:
        self._changed.set()
        if self._bell is not None:
            self._bell()

    def _line(self) -> list[str]:
        """The candidates by age."""
        return serial_order(self._ask(lambda client: client.get_children_async(self._nodes.candidates)))

    def _candidate(self) -> str:
        """The name of our node, made when there is none in this session."""
        self._session.open(self._patience_s * 3)
        if self._node and self._node_session == self._session.id:
            return self._node
        self._node = ""
        data = json.dumps({"who": self.who}).encode()
        self._sweep()
        # The answer to an earlier one may have been lost, and the sweep have missed it.
        self._has_doubles = self._left_in is not None
        session = self._left_in = self._session.id
        path, stat = self._ask(
            lambda client: client.create_async(
                self._nodes.candidate_prefix(self._guid),
                data,
                ephemeral=True,
                sequence=True,
                makepath=True,
                include_data=True,
            )
        )
        if stat.ephemeralOwner != session:
            raise ZooKeeperUnreachable(f"the session changed while we stood for {self.name!r}")
        self._node, self._node_session = path.rpartition("/")[2], session
        return self._node

    def _without_doubles(self, line: list[str]) -> list[str]:
        """The line, without nodes of ours that we did not know of: we would wait for ourselves."""
        for name in line:
            if self._guid in name and name != self._node:
                self._delete(name)
        self._has_doubles = False
        return [name for name in line if self._guid not in name or name == self._node]

    def _sweep(self) -> None:
        """Delete what is left of a creation whose answer was lost, or of an earlier session of ours."""
        with contextlib.suppress(NoNodeError):
            for name in self._line():
                if self._guid in name:
                    self._delete(name)

    def _delete(self, name: str) -> None:
        with contextlib.suppress(NoNodeError):
            self._ask(lambda client: client.delete_async(self._nodes.candidate(name)))

    # -- leading

    def accede(self, floor: int, since: float) -> Accession:
        """Take the lead: checks the candidate and raises the epoch in one transaction."""
        self._check_session()
        epoch, version = self._read_epoch()
        token = max(int(epoch["token"]), floor) + 1
        data = {"token": token, "who": self.who, "since": since, "clean": False}
        self._commit(
            f"accession to {self.name!r}",
            lambda batch: (
                batch.check(self._nodes.candidate(self._node), -1),
                batch.set_data(self._nodes.epoch, json.dumps(data).encode(), version=version),
            ),
        )
        self._epoch_version, self._token, self._since = version + 1, token, since
        former = int(epoch["token"]) if epoch["who"] == self.who else 0
        return Accession(token, bool(epoch["clean"]), former)

    def renew(self) -> None:
        """Stay the leader: writes the candidate, if nobody has raised the epoch."""
        self._check_session()
        if self.suspended:
            # To wait for a connection would be to miss that the session ends. Who is told of it comes again.
            self._drop_the_dead(DEAD_TOO)
            raise ZooKeeperUnreachable(f"the connection for {self.name!r} is broken")
        data = json.dumps({"who": self.who, "token": self._token}).encode()
        try:
            self._commit(
                f"renewal for {self.name!r}",
                lambda batch: (
                    batch.check(self._nodes.epoch, self._epoch_version),
                    batch.set_data(self._nodes.candidate(self._node), data),
                ),
            )
        except ZooKeeperUnreachable:
            self._drop_the_dead(0.0)
            raise
        # Another session may have written to what the old one had left.
        self._check_session()

    def resign(self, clean: bool) -> None:
        """Say whether the work has ended, and leave the line of candidates, in one transaction.

        When that fails, a node may be left, and the epoch may say nothing; calling again makes up for both.
        """
        self._listen(False)
        if self._left_in is not None and self._left_in == self._session.id:
            told = clean and self._token > 0 and self._node and self._hand_over()
            if self._node and not told:
                self._delete(self._node)
            if not self._node or self._has_doubles:
                self._sweep()
        # Else there is none, or it has gone with its session. Forgotten any earlier, none is repeated.
        self._node, self._token, self._left_in = "", 0, None

    def _hand_over(self) -> bool:
        """Say that the work has ended; return whether it was for us to say."""
        data = {"token": self._token, "who": self.who, "since": self._since, "clean": True}
        try:
            self._commit(
                f"resignation from {self.name!r}",
                lambda batch: (
                    batch.set_data(self._nodes.epoch, json.dumps(data).encode(), version=self._epoch_version),
                    batch.delete(self._nodes.candidate(self._node)),
                ),
            )
        except NotElected:
            return False  # somebody else has the epoch, or the node is gone
        return True

    def standing(self) -> list[str]:
        """The names of all candidates, by age."""
        names = []
        with contextlib.suppress(NoNodeError):
            for node in self._line():
                with contextlib.suppress(NoNodeError):
                    path = self._nodes.candidate(node)
                    data, _ = self._ask(lambda client, path=path: client.get_async(path))
                    names.append(str(json.loads(data)["who"]))
        return names

    def leader(self) -> Leader | None:
        """Who leads, as the epoch says; None after a clean hand-over and before the first election."""
        try:
            data, _ = self._ask(lambda client: client.get_async(self._nodes.epoch))
        except NoNodeError:
            return None
        epoch = json.loads(data)
        return None if epoch["clean"] else Leader(epoch["who"], int(epoch["token"]), float(epoch["since"]))

    # -- inside

    def _drop_the_dead(self, pause: float) -> None:
        """Have the client look for another server, if this one has confirmed nothing for too long.

        :param pause: as a share of the session, since it was done last.
        """
        now = self._clock.monotonic()
        if (
            now - self._answered_at > DEAD * self.session_s
            and now - self._dropped_at > pause * self.session_s
        ):
            self._dropped_at = now
            self._session.drop()

    def _check_session(self) -> None:
        ended = self._session.state in (State.LOST, State.CLOSED)
        if ended or not self._node or self._node_session != self._session.id:
            raise NotElected(f"our candidacy for {self.name!r} ended with its session")

    @property
    def _patience_s(self) -> float:
        return max(self.session_s * PATIENCE, 0.1)

    def _ask(self, request: Any) -> Any:
        return self._session.ask(request, self._patience_s)

    def _read_epoch(self) -> tuple[dict[str, Any], int]:
        path = self._nodes.epoch
        if self._ask(lambda client: client.exists_async(path)) is None:
            first = json.dumps({"token": 0, "who": "", "since": 0.0, "clean": True}).encode()
            with contextlib.suppress(NodeExistsError):
                self._ask(lambda client: client.create_async(path, first, makepath=True))
        data, stat = self._ask(lambda client: client.get_async(path))
        return json.loads(data), stat.version

    def _commit(self, what: str, fill: Any) -> None:
        """Carry out a transaction. kazoo's commit returns exceptions instead of raising them."""

        def request(client: Any) -> Any:
            batch = client.transaction()
            fill(batch)
            return batch.commit_async()

        answers = self._ask(request)
        # Only a write tells that the server belongs to its ensemble.
        self._answered_at = self._clock.monotonic()
        failed = [each for each in answers if isinstance(each, Exception)]
        if not failed:
            return
        for error in failed:
            if isinstance(error, (NoNodeError, BadVersionError)):
                raise NotElected(f"{what} was refused: {type(error).__name__}")
        raise KazooException(f"{what} failed: {failed!r}")
