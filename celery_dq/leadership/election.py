"""The interface of an election; implemented with ZooKeeper and with Redis."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from celery_dq.outage import Outage

__all__ = ["ElectionWon", "Election", "Leader"]


class ElectionWon(NamedTuple):
    """The result of an election that this candidate has won.

    Attributes:
        token: The fencing token, above all earlier ones.
        clean: Whether the predecessor has reported that none of its work runs, or there was no predecessor.
        former: The predecessor's token if the predecessor was this same candidate; else 0.
    """

    token: int
    clean: bool
    former: int


class Leader(NamedTuple):
    """The current leader.

    Attributes:
        who: Name of the candidate.
        token: Fencing token of its term.
        since: Time of its election, seconds since 1970.
    """

    who: str
    token: int
    since: float


class Election(Protocol):
    """One candidate for one leadership. Used by one thread at a time.

    Every method except :meth:`wait` sends requests to the server and returns within a bounded time. Without
    an answer, it raises ``OSError`` (:exc:`~celery_dq.errors.ZooKeeperUnreachable`, or a wrapped error of
    redis-py); then the request may have been carried out.

    Attributes:
        name: Name of the leadership.
        who: Name of this candidate; no other candidate ever has the same name.
    """

    name: str
    who: str

    @property
    def outage(self) -> Outage:
        """Whether the server answers; the candidates of one connection share this object."""

    @property
    def session_s(self) -> float:
        """Seconds for which the server keeps a silent leader."""

    @property
    def suspended(self) -> bool:
        """Whether the connection is known to be broken."""

    def add_listener(self, wake_event: Callable[[], None]) -> None:
        """Call `wake_event` when :attr:`suspended` changes outside of a request, or the session ends.

        `wake_event` is called in any thread and must not block. It is called only while this object is a
        candidate or the leader.
        """

    def become_candidate(self) -> bool:
        """Become or stay a candidate; return whether no other candidate is ahead."""

    def wait(self, timeout_s: float) -> None:
        """Wait until :meth:`become_candidate` may return another value, at most `timeout_s` seconds."""

    def wake(self) -> None:
        """End a :meth:`wait` in another thread, if that wait may be long."""

    def accept(self, floor: int, since: float) -> ElectionWon:
        """Become the leader with one conditional write.

        Args:
            floor: The new token is above this number, too.
            since: Wall time, for display.

        Raises:
            NotElected: Another candidate was elected in the meantime.
        """

    def renew(self) -> None:
        """Stay the leader with one conditional write.

        Raises:
            NotElected: This candidate does not lead any more.
        """

    def resign(self, clean: bool) -> None:
        """End the leadership and the candidacy.

        Args:
            clean: Whether no work of this term runs any more, so that the successor need not wait.
        """

    def candidates(self) -> list[str]:
        """Return the names of all living candidates, the leader first; callable from any thread."""

    def leader(self) -> Leader | None:
        """Return the current leader, as far as the server knows."""
