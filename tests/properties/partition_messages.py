"""The data of the model of a partition: quotas, messages, and the messages that a consumer holds."""

from __future__ import annotations

from dataclasses import dataclass, field

from celery_dq.options.quota import WhenFull


@dataclass
class Quota:
    burst: int = 0  # 0 is not a rate
    weight: float = 1.0
    concurrency: int = 0
    paused: bool = False
    max_waiting: int = 0  # 0 is not a bound
    when_full: WhenFull = "refuse"


@dataclass
class Message:
    id: str
    task: str
    tenant: str
    priority: int
    expired: bool
    delayed: bool = False
    accepted: bool = False
    score: float = 0.0
    crashes: int = 0
    returned: bool = False
    reason: str = ""
    settled: bool = False


@dataclass
class Held:
    claim: int
    message: Message
    charge: float = 0.0
    #: The tenant whose slot it takes: one of the resources of a set, else that of the message.
    resource: str = ""


@dataclass
class Took:
    entries: list[tuple[str, str, int, bool, str]] = field(default_factory=list)
    suspect: bool = False
    needs_slot: bool = False
