"""Asking ZooKeeper from the fetcher's thread: several requests at once, none waited for in vain."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple

from kazoo.exceptions import KazooException, NodeExistsError, NoNodeError

from celery_dq.errors import ZooKeeperUnreachable
from celery_dq.znodes import PRESENCES
from celery_dq.zookeeper.reading import begin_reading, readings
from celery_dq.zookeeper.session import SILENCE, Session, State
from celery_dq.zookeeper.transaction import Refused, Step, begin, check, verdict

#: The share of a session after which an answer is not waited for any longer.
PATIENCE = 2.0 / 3.0


class Begun(NamedTuple):
    """A transaction that is on its way."""

    steps: Sequence[Step]
    pending: Any


class Talk:
    """One consuming session.

    Everything that is said about held messages is checked against an ephemeral node of our own, in the same
    transaction: what is sent when the session has ended, and another one has begun unseen, changes nothing.

    Arguments:
        session: must be open.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.client: Any = session.open()
        self.session_id = session.id
        self.guid = uuid.uuid4().hex
        self.own = f"{PRESENCES}/{self.guid}"

    def introduce(self) -> None:
        """Make the node of our own."""
        self.wait(self.client.ensure_path_async(PRESENCES))
        try:
            self.wait(self.client.create_async(self.own, b"", ephemeral=True))
        except NodeExistsError:
            # It was made, and the answer was lost.
            return

    @property
    def holds(self) -> bool:
        """The session is what it was when we began, as far as anybody knows."""
        session = self.session
        return session.state is State.CONNECTED and session.id == self.session_id

    @property
    def is_over(self) -> bool:
        """The session is not what it was when we began, and our locks are gone."""
        session = self.session
        return session.state in (State.LOST, State.CLOSED) or session.id != self.session_id

    @property
    def patience_s(self) -> float:
        """Seconds that an answer is waited for."""
        return self.session.timeout_s * PATIENCE

    def wait(self, answer: Any) -> Any:
        """Wait for what was asked.

        Raises:
            ZooKeeperUnreachable: No answer; it may have been done all the same.
            kazoo.exceptions.KazooException: What the server answered.
        """
        try:
            return answer.get(timeout=self.patience_s)
        except SILENCE as error:
            raise ZooKeeperUnreachable(f"ZooKeeper did not answer: {error!r}") from None
        except self.client.handler.timeout_exception:
            # Requests that flow count as signs of life, answered or not.
            self.session.drop()
            raise ZooKeeperUnreachable(
                f"ZooKeeper at {self.session.hosts} did not answer within {self.patience_s:g} s"
            ) from None

    def begin(self, steps: Sequence[Step]) -> Begun:
        """Send a transaction that happens only as long as the session lasts."""
        checked = [check(self.own), *steps]
        return Begun(checked, begin(self.client, checked))

    def refused(self, begun: Begun) -> Refused | None:
        """Wait for a transaction: why it did not happen, the step counted from 0; None when it did.

        Raises:
            ZooKeeperUnreachable: No answer, or the session has ended.
        """
        try:
            verdict(begun.steps, self.wait(begun.pending))
        except Refused as refusal:
            if refusal.index == 0:
                raise ZooKeeperUnreachable("The session with ZooKeeper has ended") from None
            return Refused.at(refusal.index - 1, refusal.step, refusal.error)
        return None

    def read_async(self, paths: Sequence[str]) -> list[Any]:
        """Ask for many nodes; see :meth:`read`."""
        return begin_reading(self.client, paths)

    def read(self, asked: Sequence[Any], paths: Sequence[str]) -> list[tuple[bytes, Any] | None]:
        """Data and stat of every path, None where there is no node; `asked` is what `read_async` returned."""
        answers = [self._answer(each) for each in asked]
        found = readings(self.session, paths, answers, self.patience_s)
        for each in found:
            if isinstance(each, Exception) and not isinstance(each, NoNodeError):
                raise each
        return [None if isinstance(each, Exception) else each for each in found]

    def _answer(self, asked: Any) -> Any:
        try:
            return self.wait(asked)
        except KazooException as error:
            return error
