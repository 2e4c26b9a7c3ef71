"""Every error that celery-dq raises, under one base.

An error names the option, key or value at fault, shows the value and says the
remedy. All of them survive pickling, because Celery sends exceptions between
processes: an error keeps its message in ``args`` and nothing else.
"""

from __future__ import annotations


class DQError(Exception):
    """Base of everything that celery-dq raises."""


class ConfigurationError(DQError, ValueError):
    """An option is unknown, has the wrong type, or contradicts another one."""


class ServerError(DQError):
    """The server is too old or set up in a way that loses messages."""


class InvalidMessage(DQError, ValueError):
    """A message cannot be accepted: its tenant, priority, id or times are unusable."""


class InvalidRequest(DQError, TypeError):
    """A call asks for too little, for too much, or for what contradicts itself."""


class InvalidTenant(InvalidMessage):
    """A tenant's name is neither str nor int, too long, or holds control characters."""


class InvalidPriority(InvalidMessage):
    """A priority is not a whole number, or out of its range: 0 to 9, in a Curator queue 32 bits."""


class InvalidQuota(DQError, ValueError):
    """A quota is impossible: a rate, burst, weight or concurrency out of its range."""


class CorruptRecord(DQError, ValueError):
    """A stored record cannot be read; the message goes to the dead letters."""


class ScriptError(DQError):
    """A Lua script is missing, includes itself, or breaks its contract."""


class TooFewReplicas(DQError, ConnectionError):
    """A push is stored, but fewer replicas than asked for have confirmed it in time."""


class DeliveriesExhausted(DQError):
    """Every worker that had this task was lost; it is not tried again. The result of such a task."""


class ZooKeeperUnreachable(DQError, ConnectionError):
    """ZooKeeper did not answer in time; what was asked may have been done all the same."""


class MessageTooLarge(InvalidMessage):
    """A message would exceed what ZooKeeper takes in one request (1 MiB by default). Nothing was sent."""


class AccessDenied(ConfigurationError):
    """ZooKeeper does not let this session do something: it lacks the credentials that an ACL asks for."""


class NotElected(DQError):
    """Somebody else leads, or the candidate is gone: what only a leader may do was not done."""


class Fenced(DQError):
    """A fencing token is not the current one: a later leader has taken over."""


class InvalidKey(InvalidMessage):
    """No dedup key can be made of a call: an argument is missing or has no canonical form."""


class DuplicateCall(DQError):
    """A call was declined because another one covers it, and its task says ``on_duplicate="raise"``."""


class ClaimLost(DQError):
    """The dedup claim of a run was taken away (it ran too long, or its lease ran out)."""


class CoveringRunUnknown(DQError):
    """A duplicate waited for another run's result, and that result is not to be had."""


class QueueFull(DQError):
    """A bounded queue has no room, and the caller did not want to wait (longer)."""


class QueueEmpty(DQError):
    """A queue held nothing, for as long as the caller wanted to wait."""


class QueueClosed(DQError):
    """Something was submitted to a queue that has been closed."""


class CorruptSegment(DQError, ValueError):
    """A file of the spill log cannot be read from here on; what stands before it can."""


class SpillFailed(DQError, OSError):
    """The spill log cannot be written: the disk is full, gone, or not ours."""
