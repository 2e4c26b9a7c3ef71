"""Several changes that ZooKeeper makes together or not at all.

The client's own transactions do not raise: their commit returns a list that may hold exceptions, and a
request that is too large breaks the connection. Here, what is refused raises, and says which step it was;
the size is checked before anything is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kazoo.exceptions import (
    AuthFailedError,
    InvalidACLError,
    KazooException,
    NoAuthError,
    RolledBackError,
    RuntimeInconsistency,
)

from celery_dq.errors import (
    AccessDenied,
    ConfigurationError,
    DQError,
    MessageTooLarge,
    ZooKeeperUnreachable,
)
from celery_dq.zookeeper.session import SILENCE, Session

__all__ = [
    "MAX_REQUEST",
    "Refused",
    "Step",
    "ask_all",
    "check",
    "check_size",
    "create",
    "delete",
    "set_data",
    "size_of",
    "transact",
]

#: Bytes of one request that a server takes with its defaults (``jute.maxbuffer``).
MAX_REQUEST = 0xFFFFF
#: Bytes that a step takes besides its path and data: headers, ACL, flags; rounded up.
STEP_OVERHEAD = 96
#: Bytes of a request besides its steps.
REQUEST_OVERHEAD = 64


class Step(NamedTuple):
    """One change, or one condition, of a transaction."""

    kind: str
    path: str
    data: bytes = b""
    version: int = -1
    ephemeral: bool = False
    sequence: bool = False


def create(path: str, data: bytes = b"", *, ephemeral: bool = False, sequence: bool = False) -> Step:
    """Create `path`; its answer is the path, with the sequence number if it got one."""
    return Step("create", path, data, ephemeral=ephemeral, sequence=sequence)


def delete(path: str, version: int = -1) -> Step:
    """Delete `path`, if it has this version (-1: any)."""
    return Step("delete", path, version=version)


def set_data(path: str, data: bytes, version: int = -1) -> Step:
    """Write `path`, if it has this version (-1: any); its answer is the new stat."""
    return Step("set_data", path, data, version)


def check(path: str, version: int = -1) -> Step:
    """Go on only if `path` exists and has this version (-1: any)."""
    return Step("check", path, version=version)


class Refused(DQError):
    """A transaction was refused, nothing of it was done.

    `index` and `step` say which step was the first that could not be done, `error` why.
    """

    index: int
    step: Step
    error: KazooException

    @classmethod
    def at(cls, index: int, step: Step, error: KazooException) -> Refused:
        """The refusal of one step."""
        refusal = cls(f"step {index}, {step.kind} {step.path}: {error!r}")
        refusal.index, refusal.step, refusal.error = index, step, error
        return refusal


def size_of(steps: Sequence[Step], chroot: str = "") -> int:
    """Bytes that a request with these steps has at most, rounded up by less than 100 a step."""
    root = len(chroot.encode())
    return REQUEST_OVERHEAD + sum(
        STEP_OVERHEAD + root + len(step.path.encode()) + len(step.data) for step in steps
    )


def check_size(steps: Sequence[Step], chroot: str = "", *, limit: int = MAX_REQUEST) -> None:
    """Raise :exc:`~celery_dq.errors.MessageTooLarge` if the request would break the connection."""
    size = size_of(steps, chroot)
    if size > limit:
        largest = max(steps, key=lambda step: len(step.data))
        raise MessageTooLarge(
            f"{len(largest.data)} bytes for {largest.path} make a request of {size} bytes, and "
            f"ZooKeeper takes {limit}: store the data elsewhere and send where it is, or put fewer at a time"
        )


def transact(session: Session, steps: Sequence[Step], timeout_s: float) -> list[Any]:
    """Make all `steps` at once and return their answers.

    Raises:
        Refused: One of them could not be done; nothing was.
        ZooKeeperUnreachable: No answer; it may have been done all the same.
        MessageTooLarge: Nothing was sent.
        AccessDenied: The session may not do this.
    """

    def send(client: Any) -> list[Any]:
        return [begin(client, steps)]

    return verdict(steps, ask_all(session, send, timeout_s)[0])


def begin(client: Any, steps: Sequence[Step]) -> Any:
    """Send `steps`; the asynchronous result is for :func:`verdict`."""
    check_size(steps, client.chroot)
    transaction = client.transaction()
    for step in steps:
        if step.kind == "create":
            transaction.create(step.path, step.data, ephemeral=step.ephemeral, sequence=step.sequence)
        elif step.kind == "delete":
            transaction.delete(step.path, step.version)
        elif step.kind == "set_data":
            transaction.set_data(step.path, step.data, step.version)
        else:
            transaction.check(step.path, step.version)
    return transaction.commit_async()


def verdict(steps: Sequence[Step], answers: Any) -> list[Any]:
    """The answers of a transaction, or the exception that says why there are none."""
    if isinstance(answers, Exception):
        raise answers
    for index, answer in enumerate(answers):
        if isinstance(answer, Exception) and not isinstance(answer, RolledBackError | RuntimeInconsistency):
            if isinstance(answer, NoAuthError | InvalidACLError):
                raise denied(steps[index].kind, steps[index].path, answer)
            raise Refused.at(index, steps[index], answer)
    result: list[Any] = answers
    return result


def denied(kind: str, path: str, error: Exception) -> AccessDenied:
    """The error for a session that lacks the right to do `kind` at `path`."""
    return AccessDenied(
        f"ZooKeeper does not let this session {kind} {path} ({type(error).__name__}): give the "
        "credentials that the ACL of the path asks for, as auth=[('digest', 'user:password')] or sasl={…}"
    )


def ask_all(session: Session, send: Callable[[Any], Sequence[Any]], timeout_s: float) -> list[Any]:
    """Send several requests at once; for each its answer, or the exception that is its answer.

    :param send: gets the client, returns kazoo's asynchronous results.
    :param timeout_s: seconds to wait for all of them.

    Raises:
        ZooKeeperUnreachable: One of them got no answer. Any may have been carried out all the same.
        ConfigurationError: The server refused the credentials.
    """
    client = session.open(timeout_s)
    answers: list[Any] = []
    for pending in send(client):
        try:
            answers.append(pending.get(timeout=timeout_s))
        except (*SILENCE, client.handler.timeout_exception) as error:  # noqa: PERF203 - each answer by itself
            raise ZooKeeperUnreachable(
                f"ZooKeeper at {session.hosts} did not answer within {timeout_s:g} s: {error!r}"
            ) from None
        except AuthFailedError as error:
            raise ConfigurationError(
                f"ZooKeeper at {session.hosts} refused the credentials: {error!r}"
            ) from None
        except KazooException as error:
            answers.append(error)
    return answers
