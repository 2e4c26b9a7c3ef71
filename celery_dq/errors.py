"""All errors of celery-dq, with one base class.

The text of an error names the option, key or value, shows the value, and gives the reason and a remedy. All
errors survive pickling, because Celery sends exceptions between processes: an error keeps only its text, in
``args``.
"""

from __future__ import annotations

#: Characters of the description of a foreign error, which may show any part of the data that it is about.
LONGEST_REASON = 500


def described(error: BaseException) -> str:
    """Return the class and the text of a foreign error, whose own ``__str__`` may fail.

    The ``repr`` of redis-py's errors omits the text.
    """
    try:
        return f"{type(error).__name__}: {error}"[:LONGEST_REASON]
    except Exception:
        return f"{type(error).__name__}: (its text cannot be made)"


class DQError(Exception):
    """Base class of all errors of celery-dq."""


class ConfigurationError(DQError, ValueError):
    """An option is unknown, has the wrong type, or contradicts another one."""


class MissingLibrary(ConfigurationError, ImportError):
    """A library is not installed. For one that celery-dq needs, the text names the extra that installs it."""

    @classmethod
    def needed_by(cls, subject: str, library: str, extra: str) -> MissingLibrary:
        """Return the error of something that needs a library.

        Args:
            subject: Setting with its value, scheme or command that needs the library.
            library: Name of the library.
            extra: The extra of celery-dq that installs it.
        """
        return cls(f"{subject} needs {library}, which is not installed: pip install 'celery-dq[{extra}]'")


class ServerError(DQError):
    """The server is too old or set up in a way that loses messages."""


class InvalidMessage(DQError, ValueError):
    """A message cannot be accepted, because its tenant, priority, id or times are invalid."""


class InvalidRequest(DQError, TypeError):
    """The arguments of a call are missing, out of range, or contradict each other."""


class InvalidTenant(InvalidMessage):
    """A tenant's name is neither str nor int, too long, or holds control characters."""


class InvalidPriority(InvalidMessage):
    """A priority is not a whole number, or not from 0 to 9 (in a Curator queue, not within 32 bits)."""


class InvalidQuota(DQError, ValueError):
    """A part of a quota is unknown, has the wrong type, or is out of range."""


class TenantMoving(DQError):
    """A tenant has not arrived in its new partitions yet. The same call goes on with its moves."""


class CorruptRecord(DQError, ValueError):
    """A stored record cannot be read; the message becomes a dead letter."""

    @classmethod
    def of(cls, what: str, error: Exception) -> CorruptRecord:
        """Return the error of data whose decoder has raised another one, of any class.

        Data decide which error their decoder raises, so each of them means that the data cannot be read. A
        list of the expected classes always lacks one.

        Args:
            what: The data, such as ``a stored message``.
            error: The error of the decoder.
        """
        return error if isinstance(error, cls) else cls(f"{what} cannot be read: {described(error)}")


class ScriptError(DQError):
    """A Lua script is missing, includes itself, or breaks its contract."""


class TooFewReplicas(DQError, ConnectionError):
    """A publish is stored, but fewer replicas than ``dq_confirm_replicas`` confirmed it in time."""


class DeliveriesExhausted(DQError):
    """The result of a task that is not tried again, because each worker that had it was lost."""


class ZooKeeperUnreachable(DQError, ConnectionError):
    """ZooKeeper did not answer in time. The request may have taken effect."""


class StoreUnreachable(DQError, ConnectionError):
    """The connection to a store of :mod:`celery_dq.transport.any_store` has ended."""


class MessageTooLarge(InvalidMessage):
    """A message exceeds the size of a request to ZooKeeper (1 MiB by default). It was not sent."""


class AccessDenied(ConfigurationError):
    """ZooKeeper refused a request, because the session lacks the credentials that an ACL requires.

    Attributes:
        path: The node of the request.
    """

    path: str = ""


class NotElected(DQError):
    """An action that only a leader may take was refused: another candidate leads, or this one is gone."""


class Fenced(DQError):
    """A fencing token is not the current one, because a later leader was elected."""


class InvalidKey(InvalidMessage):
    """The dedup key of a call cannot be computed: an argument is missing or has no canonical form."""


class DuplicateCall(DQError):
    """A call was declined because another call covers it, and its task has ``on_duplicate="raise"``."""


class DedupLockLost(DQError):
    """A run lost its dedup lock, because it exceeded its timeout or its lease expired."""


class CoveringRunUnknown(DQError):
    """A duplicate waited for the result of another run, and that result is not available."""


class QueueFull(DQError):
    """A bounded queue has no room, and the caller does not wait or has waited long enough.

    For a call of a tenant at its ``max_waiting``, the error is a ``kombu.exceptions.OperationalError``, too.
    """


class QueueEmpty(DQError):
    """A queue was empty for as long as the caller waited."""


class QueueClosed(DQError):
    """A request was submitted to a closed queue."""


class CorruptSegment(DQError, ValueError):
    """A file of the spill log cannot be read beyond a point. The records before that point are valid."""


class SpillFailed(DQError, OSError):
    """The spill log cannot be written: the disk is full or gone, or the folder is not usable."""
