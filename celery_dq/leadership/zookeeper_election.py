"""Elections by ZooKeeper's recipe: the candidate with the lowest sequence leads.

::

    …/candidates/c-<guid>-0000000007    ephemeral: one candidate
    …/epoch                             persistent: the last token, its leader, whether it handed over cleanly

It differs from the recipe in these points, because of faults of the recipe:

* A candidate's node may be created while the answer is lost. The node is found again by its GUID. The
  node is deleted before another one is created, and again afterwards, because a server may not have known
  it at first.
* A read may be answered by a server that is cut off from its ensemble. Therefore a candidate leads only after
  a *write*: the election and each renewal are transactions that check the candidate and the epoch.
* The predecessor is watched through its (empty) list of children. Such a watch fires when the node is
  deleted, and not at each renewal, which writes the node.
"""

from __future__ import annotations

import contextlib
import json
import threading
import uuid
from collections import deque
from collections.abc import Callable, Collection
from typing import Any

from kazoo.exceptions import BadVersionError, NodeExistsError, NoNodeError

from celery_dq.errors import NotElected, ZooKeeperUnreachable
from celery_dq.leadership.elector import ElectionWon, Leader
from celery_dq.outage import Outage
from celery_dq.znodes import LeadershipNodes, guid_of, leaderships, serial_order
from celery_dq.zookeeper.multi_read import existing, read_all
from celery_dq.zookeeper.session import Session, SessionState
from celery_dq.zookeeper.transaction import (
    Step,
    TransactionRefused,
    ask_all,
    begin,
    check,
    delete,
    set_data,
    transact,
    verdict,
)

__all__ = ["ZooKeeperElection", "ZooKeeperLines", "leadership_names"]

#: Timeout of a request, as a share of the session.
PATIENCE = 1 / 6
#: Maximum readings of the list of candidates, if it changes while it is read.
LOOKS = 20


def leadership_names(session: Session, environment: str) -> list[str]:
    """Return the names of all leaderships that ever had a candidate.

    Raises:
        ZooKeeperUnreachable: ZooKeeper does not answer.
    """
    found = session.children(leaderships(environment), session.timeout_s)
    return sorted(map(LeadershipNodes.name_of, found))


def forget_leadership(session: Session, nodes: LeadershipNodes) -> None:
    """Remove the nodes of a leadership, all of them or, if a candidate lives, none.

    Raises:
        ZooKeeperUnreachable: ZooKeeper does not answer.
    """
    # A candidate that was never elected leaves no epoch.
    children = session.children(nodes.path, session.timeout_s)
    steps = [*(delete(f"{nodes.path}/{child}") for child in children), delete(nodes.path)]
    with contextlib.suppress(TransactionRefused):
        transact(session, steps, session.timeout_s)


class ZooKeeperLines:
    """Reads the lines of many leaderships; a line that has not changed costs no request. Thread-safe.

    A watch on each line tells of its changes, and a name of a candidate is read once for each GUID.

    Args:
        session: The session.
        environment: ``online`` or ``sandbox``.

    Attributes:
        changed: Whether a line has changed since the last reading.
    """

    def __init__(self, session: Session, environment: str) -> None:
        self.changed = False
        self._session = session
        self._environment = environment
        self._lock = threading.Lock()
        self._session_id: int | None = None
        #: The nodes in each line whose watch has not fired.
        self._known: dict[str, list[str]] = {}
        #: Lines whose watch has fired, perhaps before the answer was read.
        self._fired: deque[str] = deque()
        self._who: dict[str, str] = {}

    def read(self, names: Collection[str]) -> dict[str, list[str]]:
        """Return the names of the candidates in each line, the oldest first.

        Raises:
            ZooKeeperUnreachable: ZooKeeper does not answer.
        """
        with self._lock:
            timeout_s = self._session.timeout_s
            self._session.open(timeout_s)
            if self._session.id != self._session_id:
                # The watches have ended with their session.
                self._known, self._session_id = {}, self._session.id
            self.changed = False
            while self._fired:
                self._known.pop(self._fired.popleft(), None)
            nodes = {name: LeadershipNodes(self._environment, name) for name in names}
            unknown = [name for name in names if name not in self._known]
            answers = ask_all(
                self._session,
                lambda client: [
                    client.get_children_async(nodes[name].candidates, self._watch(name)) for name in unknown
                ],
                timeout_s,
            )
            for name, answer in existing(unknown, answers):
                self._known[name] = serial_order(answer)
            lines = {name: self._known.get(name, []) for name in names}
            self._read_names({node: nodes[name] for name in lines for node in lines[name]}, timeout_s)
            # A candidate that was gone before its name was read is in no line any more.
            return {
                name: [self._who[guid] for guid in map(guid_of, line) if guid in self._who]
                for name, line in lines.items()
            }

    def _read_names(self, folders: dict[str, LeadershipNodes], timeout_s: float) -> None:
        guids = {guid_of(node): node for node in folders}
        self._who = {guid: who for guid, who in self._who.items() if guid in guids}
        unknown = [(guid, node) for guid, node in guids.items() if guid not in self._who]
        paths = [folders[node].candidate(node) for _, node in unknown]
        answers = read_all(self._session, paths, timeout_s)
        for guid, (data, _) in existing([guid for guid, _ in unknown], answers):
            self._who[guid] = str(json.loads(data)["who"])

    def _watch(self, name: str) -> Callable[[Any], None]:
        def fired(_event: Any) -> None:
            self._fired.append(name)
            self.changed = True

        return fired


class ZooKeeperElection:
    """One candidate for one leadership; see :class:`~celery_dq.leadership.elector.Election`.

    Args:
        session: The session; several elections may share it.
        nodes: The nodes of the leadership.
        who: A readable name of the candidate; a unique suffix is added.
        guid: The GUID in the names of this candidate's nodes; default a new one. The candidates of one worker
            for several leaderships may share one; see :class:`ZooKeeperLines`.
    """

    def __init__(self, session: Session, nodes: LeadershipNodes, who: str, guid: str = "") -> None:
        self.name = nodes.name
        self.who = f"{who}:{uuid.uuid4().hex[:12]}"
        self._session = session
        self._nodes = nodes
        self._guid = guid or uuid.uuid4().hex
        self._node = ""
        self._node_session: int | None = None
        #: The session in which a candidate node of unknown name may be left.
        self._left_in: int | None = None
        #: Whether a second candidate node of this object may exist.
        self._has_doubles = False
        self._epoch_version = -1
        self._token = 0
        self._since = 0.0
        self._changed = threading.Event()
        self._wake_event: Callable[[], None] | None = None
        self._listening = False

    @property
    def outage(self) -> Outage:
        """Whether ZooKeeper answers this session."""
        return self._session.outage

    @property
    def session_s(self) -> float:
        """The negotiated session timeout."""
        return self._session.timeout_s

    @property
    def suspended(self) -> bool:
        """Whether the connection is known to be broken."""
        return self._session.state is not SessionState.CONNECTED

    def add_listener(self, wake_event: Callable[[], None]) -> None:
        """Call `wake_event` at every change of the session's state; see the protocol."""
        self._wake_event = wake_event

    # -- candidacy

    def become_candidate(self) -> bool:
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
        """Wait until the predecessor is gone or the state of the connection has changed."""
        self._changed.wait(timeout_s)

    def wake(self) -> None:
        """End a wait."""
        self._changed.set()

    def _listen(self, wanted: bool) -> None:
        if wanted != self._listening:
            self._listening = wanted
            (self._session.add_listener if wanted else self._session.remove_listener)(self._on_state)

    def _on_gone(self, event: Any) -> None:
        self._changed.set()

    def _on_state(self, state: SessionState) -> None:
        self._changed.set()
        if self._wake_event is not None:
            self._wake_event()

    def _line(self) -> list[str]:
        """Return the names of the candidate nodes, the oldest first."""
        return serial_order(self._ask(lambda client: client.get_children_async(self._nodes.candidates)))

    def _candidate(self) -> str:
        """Return the name of this object's candidate node; create it if there is none in this session."""
        self._session.open(self._patience_s * 3)
        if self._node and self._node_session == self._session.id:
            return self._node
        self._node = ""
        data = json.dumps({"who": self.who}).encode()
        self._sweep()
        # An earlier creation may have lost its answer, and the sweep may have missed its node.
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
            raise ZooKeeperUnreachable(f"the session changed during the candidacy for {self.name!r}")
        self._node, self._node_session = path.rpartition("/")[2], session
        return self._node

    def _without_doubles(self, line: list[str]) -> list[str]:
        """Delete further nodes of this object from the line; it would wait for itself otherwise."""
        for name in line:
            if self._guid in name and name != self._node:
                self._delete(name)
        self._has_doubles = False
        return [name for name in line if self._guid not in name or name == self._node]

    def _sweep(self) -> None:
        """Delete this object's nodes from a creation with a lost answer or from an earlier session."""
        with contextlib.suppress(NoNodeError):
            for name in self._line():
                if self._guid in name:
                    self._delete(name)

    def _delete(self, name: str) -> None:
        with contextlib.suppress(NoNodeError):
            self._ask(lambda client: client.delete_async(self._nodes.candidate(name)))

    # -- leading

    def accept(self, floor: int, since: float) -> ElectionWon:
        """Become the leader: check the candidate and raise the epoch in one transaction."""
        self._check_session()
        epoch, version = self._read_epoch()
        token = max(int(epoch["token"]), floor) + 1
        data = {"token": token, "who": self.who, "since": since, "clean": False}
        self._commit(
            f"election for {self.name!r}",
            check(self._nodes.candidate(self._node)),
            set_data(self._nodes.epoch, json.dumps(data).encode(), version),
        )
        self._epoch_version, self._token, self._since = version + 1, token, since
        former = int(epoch["token"]) if epoch["who"] == self.who else 0
        return ElectionWon(token, bool(epoch["clean"]), former)

    def renew(self) -> None:
        """Stay the leader: write the candidate if the epoch is unchanged, in one transaction."""
        self._check_session()
        if self.suspended:
            # A wait for a connection could miss the end of the session. The caller tries again when the
            # connection changes.
            raise ZooKeeperUnreachable(f"the connection for {self.name!r} is broken")
        data = json.dumps({"who": self.who, "token": self._token}).encode()
        self._commit(
            f"renewal for {self.name!r}",
            check(self._nodes.epoch, self._epoch_version),
            set_data(self._nodes.candidate(self._node), data),
        )
        # The write may have been sent in a new session, to a node that the old session has left.
        self._check_session()

    def resign(self, clean: bool) -> None:
        """Write `clean` into the epoch and delete the candidate, in one transaction.

        After a failure, the candidate may be left and the epoch unchanged; a repeated call does both again.
        """
        self._listen(False)
        if self._left_in is not None and self._left_in == self._session.id:
            handed_over = clean and self._token > 0 and self._node and self._hand_over()
            if self._node and not handed_over:
                self._delete(self._node)
            if not self._node or self._has_doubles:
                self._sweep()
        # Otherwise there is no node, or it ended with its session. Reset last, so that a failed call can be
        # repeated.
        self._node, self._token, self._left_in = "", 0, None

    def _hand_over(self) -> bool:
        """Write into the epoch that the work has ended; return False if this candidate does not lead."""
        data = {"token": self._token, "who": self.who, "since": self._since, "clean": True}
        try:
            self._commit(
                f"resignation from {self.name!r}",
                set_data(self._nodes.epoch, json.dumps(data).encode(), self._epoch_version),
                delete(self._nodes.candidate(self._node)),
            )
        except NotElected:
            return False  # another candidate has raised the epoch, or the candidate's node is gone
        return True

    def candidates(self) -> list[str]:
        """Return the names of all candidates, the oldest first."""
        nodes = serial_order(self._session.children(self._nodes.candidates, self._patience_s))
        answers = read_all(self._session, list(map(self._nodes.candidate, nodes)), self._patience_s)
        return [str(json.loads(data)["who"]) for _, (data, _) in existing(nodes, answers)]

    def leader(self) -> Leader | None:
        """Return the leader in the epoch; None after a clean hand-over and before the first election."""
        try:
            data, _ = self._ask(lambda client: client.get_async(self._nodes.epoch))
        except NoNodeError:
            return None
        epoch = json.loads(data)
        return None if epoch["clean"] else Leader(epoch["who"], int(epoch["token"]), float(epoch["since"]))

    # -- inside

    def _check_session(self) -> None:
        ended = self._session.state in (SessionState.LOST, SessionState.CLOSED)
        if ended or not self._node or self._node_session != self._session.id:
            raise NotElected(f"the candidacy for {self.name!r} ended with its session")

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

    def _commit(self, what: str, *steps: Step) -> None:
        """Carry out a transaction."""
        try:
            verdict(steps, self._ask(lambda client: begin(client, steps)))
        except TransactionRefused as refused:
            if isinstance(refused.error, (NoNodeError, BadVersionError)):
                raise NotElected(f"{what} was refused: {type(refused.error).__name__}") from None
            raise
