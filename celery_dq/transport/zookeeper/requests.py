"""The requests of a consuming session: sent several at a time, each with a bounded wait for its answer."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple

from kazoo.exceptions import KazooException, NoAuthError, NodeExistsError, NoNodeError

from celery_dq.errors import ZooKeeperUnreachable
from celery_dq.znodes import PRESENCES
from celery_dq.zookeeper.multi_read import begin_reading, readings
from celery_dq.zookeeper.session import SILENCE, Session, SessionState
from celery_dq.zookeeper.transaction import Step, TransactionRefused, begin, check, verdict

#: The wait for one answer, as a share of the session timeout.
ANSWER_SHARE = 2.0 / 3.0


class PendingTransaction(NamedTuple):
    """A transaction that was sent and not answered yet."""

    steps: Sequence[Step]
    pending: Any


class ZooKeeperRequests:
    """The requests of one consuming session.

    Every transaction about in-flight messages also checks an ephemeral node of this session, its *presence*.
    A transaction that arrives after the session has expired therefore changes nothing, even if a new session
    has begun unnoticed.

    Args:
        session: Must be open.

    Attributes:
        guid: Identifies this session in delivery tags and in the name of its presence node.
        own: Path of the presence node.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.client: Any = session.open()
        self.session_id = session.id
        self.guid = uuid.uuid4().hex
        self.own = f"{PRESENCES}/{self.guid}"
        #: The presence node was deleted although the session lives, for example with the whole chroot.
        self._is_gone = False

    def create_presence(self) -> None:
        """Create the presence node."""
        self.wait(self.client.ensure_path_async(PRESENCES))
        try:
            self.wait(self.client.create_async(self.own, b"", ephemeral=True))
        except NodeExistsError:
            # The node was created by a request whose answer was lost.
            return

    @property
    def holds(self) -> bool:
        """Whether the session is connected, and still the one in which consuming began."""
        session = self.session
        return session.state is SessionState.CONNECTED and session.id == self.session_id

    @property
    def is_session_over(self) -> bool:
        """Whether the session in which consuming began has ended, and its locks with it."""
        session = self.session
        ended = session.state in (SessionState.LOST, SessionState.CLOSED) or session.id != self.session_id
        return ended or self._is_gone

    @property
    def answer_timeout_s(self) -> float:
        """Seconds to wait for an answer."""
        return self.session.timeout_s * ANSWER_SHARE

    def wait(self, answer: Any) -> Any:
        """Wait for the answer to a request.

        Args:
            answer: The asynchronous result that kazoo returned for the request.

        Raises:
            ZooKeeperUnreachable: No answer came; the request may have been carried out.
            kazoo.exceptions.KazooException: The server refused the request.
        """
        try:
            return answer.get(timeout=self.answer_timeout_s)
        except SILENCE as error:
            raise ZooKeeperUnreachable(f"ZooKeeper did not answer: {error!r}") from None
        except self.client.handler.timeout_exception:
            raise ZooKeeperUnreachable(
                f"ZooKeeper at {self.session.hosts} did not answer within {self.answer_timeout_s:g} s"
            ) from None

    def begin(self, steps: Sequence[Step]) -> PendingTransaction:
        """Send a transaction that is carried out only if the session has not ended."""
        checked = [check(self.own), *steps]
        return PendingTransaction(checked, begin(self.client, checked))

    def refused(self, begun: PendingTransaction) -> TransactionRefused | None:
        """Wait for the answer to a transaction.

        Args:
            begun: The transaction that :meth:`begin` returned.

        Returns:
            None when the transaction was carried out. Otherwise the refusal, with the index of the refused
            step from 0.

        Raises:
            ZooKeeperUnreachable: No answer came, or the session has ended.
            AccessDenied: An ACL forbids one of the steps.
        """
        try:
            verdict(begun.steps, self.wait(begun.pending))
        except TransactionRefused as refusal:
            if refusal.index == 0:
                self._is_gone = True
                raise ZooKeeperUnreachable("The session with ZooKeeper has ended") from None
            return TransactionRefused.at(refusal.index - 1, refusal.step, refusal.error)
        return None

    def read_async(self, paths: Sequence[str]) -> list[Any]:
        """Send the requests that read these nodes; the result is for :meth:`read` or :meth:`answers`."""
        return begin_reading(self.client, paths)

    def read(self, asked: Sequence[Any], paths: Sequence[str]) -> list[tuple[bytes, Any] | None]:
        """Wait for the data and stat of every path.

        Args:
            asked: The result of :meth:`read_async`.
            paths: The same paths.

        Returns:
            For each path its data and stat; None if the node does not exist or its ACL forbids reading.
        """
        found = self.answers(asked, paths)
        return [None if isinstance(each, Exception) else each for each in found]

    def answers(self, asked: Sequence[Any], paths: Sequence[str]) -> list[Any]:
        """Wait for the data and stat of every path; a NoNodeError or NoAuthError stands for a refused one."""
        found = readings(self.session, paths, [self._answer(each) for each in asked], self.answer_timeout_s)
        for each in found:
            if isinstance(each, Exception) and not isinstance(each, (NoNodeError, NoAuthError)):
                raise each
        return found

    def _answer(self, asked: Any) -> Any:
        try:
            return self.wait(asked)
        except KazooException as error:
            return error
