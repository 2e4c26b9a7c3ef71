"""Snapshots of leaderships, read from the server of the election. No worker is asked."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from celery_dq.inspector.redis_values import moment
from celery_dq.leadership.election import Election

__all__ = ["LeaderSnapshot", "leader_snapshot"]


@dataclass(frozen=True)
class LeaderSnapshot:
    """The state of one leadership.

    Attributes:
        name: Name of the singleton queue, or of another election.
        state: ``leads``, or ``vacant``: there was no election yet, the last leader has handed over, or its
            lease or session has ended.
        leader: Name of the leading candidate: worker, host, process id and a random part; "" when vacant.
        token: Fencing token of the term; 0 when vacant.
        since: When the term began; None when vacant.
        candidates: Names of the living candidates, the leader first.
    """

    name: str
    state: Literal["leads", "vacant"]
    leader: str = ""
    token: int = 0
    since: datetime | None = None
    candidates: tuple[str, ...] = ()


def leader_snapshot(election: Election) -> LeaderSnapshot:
    """Read the state of the leadership of an election, without becoming a candidate."""
    leader, candidates = election.leader(), tuple(election.candidates())
    # ZooKeeper keeps the name of the last leader. A leader whose session has ended is not a candidate, and
    # one that has resigned is not the first candidate.
    if leader is None or candidates[:1] != (leader.who,):
        return LeaderSnapshot(election.name, "vacant", candidates=candidates)
    since = moment(leader.since * 1e6)
    return LeaderSnapshot(election.name, "leads", leader.who, leader.token, since, candidates)
