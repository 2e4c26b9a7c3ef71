"""What an election is, whoever holds it: ZooKeeper or Redis."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

__all__ = ["Accession", "Election", "Leader"]


class Accession(NamedTuple):
    """An election won.

    ``token``: above all earlier ones. ``clean``: the predecessor has said that nothing of it runs any
    more, or there was none. ``former``: the predecessor's token, where that was this candidate itself, else
    0.
    """

    token: int
    clean: bool
    former: int


class Leader(NamedTuple):
    """Who leads: the name it gave, its token, and when it was elected (seconds since 1970)."""

    who: str
    token: int
    since: float


class Election(Protocol):
    """One leadership, as seen by one who stands for it. Used by one thread at a time.

    Every method but :meth:`wait` talks to the server, within a bounded time, and raises
    ``OSError`` (:exc:`~celery_dq.errors.ZooKeeperUnreachable`, redis-py's errors wrapped alike) when
    there was no answer: then it may have happened or not.
    """

    #: What is led.
    name: str
    #: The name of this candidate; no other one, before or after, has it.
    who: str

    @property
    def session_s(self) -> float:
        """How long a silent leader is kept, in seconds, as the server has granted it."""

    @property
    def suspended(self) -> bool:
        """Whether the connection is known to be broken."""

    def listen(self, bell: Callable[[], None]) -> None:
        """Call `bell` when :attr:`suspended` has changed without being asked, or the session has ended.

        From any thread: it must not block. Only while this one stands or leads.
        """

    def stand(self) -> bool:
        """Become or stay a candidate. Returns whether nobody is before us."""

    def wait(self, timeout_s: float) -> None:
        """Wait until :meth:`stand` may say something else, at most `timeout_s` seconds."""

    def wake(self) -> None:
        """End a :meth:`wait` that goes on in another thread, if it may be a long one."""

    def accede(self, floor: int, since: float) -> Accession:
        """Take the lead: one conditional write.

        :param floor: the token will be above this one, too.
        :param since: wall time, to show.

        Raises:
            NotElected: somebody else was elected meanwhile.
        """

    def renew(self) -> None:
        """Stay the leader: one conditional write.

        Raises:
            NotElected: we do not lead any more.
        """

    def resign(self, clean: bool) -> None:
        """Lead no more, and stand no more.

        :param clean: nothing of this term runs any more, so that the successor need not wait.
        """

    def standing(self) -> list[str]:
        """The names of all living candidates, the leader first. May be called from any thread."""

    def leader(self) -> Leader | None:
        """Who leads now, as far as the server knows."""
