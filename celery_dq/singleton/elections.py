"""Candidates for the election that ``dq_election`` configures."""

from __future__ import annotations

import importlib.util
import os
import socket
import uuid
from collections.abc import Callable, Collection, Iterable
from functools import cached_property
from typing import Any

from celery_dq.errors import ConfigurationError, InvalidRequest, MissingLibrary
from celery_dq.keys import PartitionKeys
from celery_dq.leadership.elector import Election
from celery_dq.leadership.redis_election import RedisElection, RedisLines, forget_leadership, led_names
from celery_dq.options.sections import Options
from celery_dq.outage import Outage
from celery_dq.shown import shown_logger
from celery_dq.znodes import LeadershipNodes

__all__ = ["Elections", "require_kazoo", "zookeeper_session"]

logger = shown_logger(__name__)


class Elections:
    """Creates the candidates of one worker; they share a connection.

    Args:
        options: The settings of the app.
        name: A readable name of the worker.
        redis_client: Creates a client of the broker's Redis; None if the broker is not Redis.
        what: The part that needs an election, for errors.

    Raises:
        ConfigurationError: No server is configured for elections, or its client library is missing.
    """

    def __init__(
        self, options: Options, name: str, redis_client: Callable[[], Any] | None, what: str
    ) -> None:
        self._options = options
        self._who = f"{name}:{socket.gethostname()}:{os.getpid()}"
        self._session_s = options.election_session_us / 1e6
        self._redis_client = redis_client
        self._outage = Outage(logger, "election_outage")
        #: The GUID of all candidates of this worker.
        self._guid = uuid.uuid4().hex
        self._client: Any = None
        self._session: Any = None
        if not options.election and redis_client is None:
            raise ConfigurationError(
                f"{what} needs an election, which this broker cannot hold: set dq_election to "
                "zookeeper://host:2181, redis://host/db or rediss://host/db"
            )
        if self._by_zookeeper:
            require_kazoo(options)

    def candidate(self, queue: str) -> Election:
        """Create a candidate for the leadership of `queue`."""
        if self._by_zookeeper:
            # kazoo is imported only if dq_election names a ZooKeeper.
            from celery_dq.leadership.zookeeper_election import ZooKeeperElection

            nodes = LeadershipNodes(self._options.environment, queue)
            return ZooKeeperElection(self._make_session(), nodes, self._who, self._guid)
        client, keys = self._make_client(), self._keys(queue)
        return RedisElection(client, keys, self._who, self._session_s, self._outage)

    @cached_property
    def _reader(self) -> Any:
        if self._by_zookeeper:
            from celery_dq.leadership.zookeeper_election import ZooKeeperLines

            return ZooKeeperLines(self._make_session(), self._options.environment)
        return RedisLines(self._make_client(), self._keys, self._session_s)

    @property
    def changed(self) -> bool:
        """Whether a line of candidates is known to have changed since :meth:`read`."""
        return bool(self._reader.changed)

    def read(self, queues: Collection[str]) -> dict[str, list[str]]:
        """Return the candidates for each queue, the leader first."""
        lines: dict[str, list[str]] = self._reader.read(queues)
        return lines

    def led(self, known: Iterable[str]) -> list[str]:
        """Return the names of the leaderships that ever had a candidate or a leader.

        Args:
            known: Names to look for. ZooKeeper has a list of all names, and Redis has none.

        Raises:
            OSError: The server does not answer.
        """
        if self._by_zookeeper:
            from celery_dq.leadership.zookeeper_election import leadership_names

            return leadership_names(self._make_session(), self._options.environment)
        return led_names(self._make_client(), map(self._keys, known))

    def require_vacant(self, name: str) -> None:
        """Refuse a leadership that has a candidate.

        Raises:
            InvalidRequest: A candidate lives.
            OSError: The server does not answer.
        """
        candidates = self.candidate(name).candidates()
        if candidates:
            raise InvalidRequest(
                f"{candidates[0]} leads {name!r} or waits to lead it: stop the workers that have it in "
                "dq_singleton_queues, or take it out of their settings and restart them; nothing was changed"
            )

    def forget(self, name: str) -> None:
        """Remove the record of a leadership, unless a candidate has come meanwhile.

        The next fencing token of it begins at the one that the broker stores, or at 1.

        Raises:
            OSError: The server does not answer.
        """
        if self._by_zookeeper:
            from celery_dq.leadership import zookeeper_election

            nodes = LeadershipNodes(self._options.environment, name)
            zookeeper_election.forget_leadership(self._make_session(), nodes)
        else:
            forget_leadership(self._make_client(), self._keys(name))

    def _keys(self, queue: str) -> PartitionKeys:
        # The scripts of a partition look there for the lease of its leader.
        on_cluster = getattr(self._make_client(), "on_cluster", False)
        return PartitionKeys(self._options.environment, queue, 0, self._options.key_prefix, on_cluster)

    @property
    def _by_zookeeper(self) -> bool:
        return self._options.election.startswith("zookeeper://")

    @property
    def session(self) -> Any:
        """The session with ZooKeeper; None with another election or before the first candidate."""
        return self._session

    def close(self) -> None:
        """End the session, and with it the remaining candidates."""
        if self._session is not None:
            self._session.close()

    def _make_session(self) -> Any:
        if self._session is None:
            self._session = zookeeper_session(self._options)
        return self._session

    def _make_client(self) -> Any:
        if self._client is None:
            if self._options.election:
                import redis

                # A renewal must fail before the lease expires.
                timeout_s = self._session_s / 6
                self._client = redis.Redis.from_url(
                    self._options.election, socket_timeout=timeout_s, socket_connect_timeout=timeout_s
                )
            elif self._redis_client is not None:
                self._client = self._redis_client()
        return self._client


def require_kazoo(options: Options) -> None:
    """Check that the client library of ZooKeeper is installed.

    Raises:
        MissingLibrary: It is missing.
    """
    if importlib.util.find_spec("kazoo") is None:
        raise MissingLibrary.needed_by(f"dq_election = {options.election!r}", "kazoo", "zookeeper")


def zookeeper_session(options: Options) -> Any:
    """Make a session with the ZooKeeper that ``dq_election`` names; the first request opens it."""
    # kazoo is imported only if dq_election names a ZooKeeper.
    from celery_dq.zookeeper.credentials import Spelling
    from celery_dq.zookeeper.session import Session

    hosts = options.election.removeprefix("zookeeper://")
    extra: dict[str, Any] = dict(options.election_options)
    spelling = Spelling(*(f"dq_election_options[{key!r}]" for key in Spelling._fields))
    return Session(hosts, timeout_s=options.election_session_us / 1e6, spelling=spelling, **extra)
