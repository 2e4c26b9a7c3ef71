"""Transactions: several changes that ZooKeeper makes together or not at all.

kazoo's transactions do not raise: their commit returns a list that may hold exceptions, and a request that is
too large breaks the connection. Here, a refused transaction raises and names the refused step, and the size
is checked before the request is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from kazoo.exceptions import (
    InvalidACLError,
    KazooException,
    NoAuthError,
    NoNodeError,
    RolledBackError,
    RuntimeInconsistency,
)

from celery_dq.errors import (
    AccessDenied,
    DQError,
    MessageTooLarge,
    ZooKeeperUnreachable,
)
from celery_dq.zookeeper.session import Session

__all__ = [
    "MAX_REQUEST",
    "TransactionRefused",
    "Step",
    "answer_of",
    "ask_all",
    "batches",
    "check",
    "check_size",
    "create",
    "delete",
    "set_data",
    "size_of",
    "transact",
]

#: Maximum steps of a transaction of :func:`batches`.
MAX_STEPS = 100
#: Maximum bytes of one request with a server's defaults (``jute.maxbuffer``).
MAX_REQUEST = 0xFFFFF
#: Bytes of a step without its path and data: headers, ACL, flags; rounded up.
STEP_OVERHEAD = 96
#: Bytes of a request without its steps.
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
    """Create `path`; the answer is the path, with a sequence number if `sequence` is set."""
    return Step("create", path, data, ephemeral=ephemeral, sequence=sequence)


def delete(path: str, version: int = -1) -> Step:
    """Delete `path` if it has this version; -1 means any version."""
    return Step("delete", path, version=version)


def set_data(path: str, data: bytes, version: int = -1) -> Step:
    """Write `path` if it has this version; -1 means any version. The answer is the new stat."""
    return Step("set_data", path, data, version)


def check(path: str, version: int = -1) -> Step:
    """Refuse the transaction unless `path` exists and has this version; -1 means any version."""
    return Step("check", path, version=version)


class TransactionRefused(DQError):
    """A transaction was refused; none of its steps was done.

    Attributes:
        index: Index of the first step that was refused, from 0.
        step: That step.
        error: Why it was refused.
    """

    index: int
    step: Step
    error: KazooException

    @classmethod
    def at(cls, index: int, step: Step, error: KazooException) -> TransactionRefused:
        """Create the refusal of one step."""
        refusal = cls(f"step {index}, {step.kind} {step.path}: {error!r}")
        refusal.index, refusal.step, refusal.error = index, step, error
        return refusal


def size_of(steps: Sequence[Step], chroot: str = "") -> int:
    """Upper bound for the bytes of a request with these steps, less than 100 too high per step."""
    root = len(chroot.encode())
    return REQUEST_OVERHEAD + sum(
        STEP_OVERHEAD + root + len(step.path.encode()) + len(step.data) for step in steps
    )


def check_size(steps: Sequence[Step], chroot: str = "", *, limit: int = MAX_REQUEST) -> None:
    """Check that a request is not so large that it would break the connection.

    Args:
        steps: The steps of the request.
        chroot: The chroot of the session, which is part of every path.
        limit: Maximum bytes.

    Raises:
        MessageTooLarge: The request may be larger than `limit`.
    """
    size = size_of(steps, chroot)
    if size > limit:
        largest = max(steps, key=lambda step: len(step.data))
        raise MessageTooLarge(
            f"{len(largest.data)} bytes for {largest.path} make a request of {size} bytes, and "
            f"ZooKeeper takes {limit}: store the data elsewhere and send a reference, or send less at a time"
        )


def transact(session: Session, steps: Sequence[Step], timeout_s: float) -> list[Any]:
    """Do all `steps` in one transaction and return their answers.

    Raises:
        TransactionRefused: A step was refused, and none was done.
        ZooKeeperUnreachable: ZooKeeper did not answer within `timeout_s` seconds; the steps may have been
            done.
        MessageTooLarge: The request would be too large; nothing was sent.
        AccessDenied: An ACL forbids a step; none was done.
    """

    def send(client: Any) -> list[Any]:
        return [begin(client, steps)]

    return verdict(steps, ask_all(session, send, timeout_s)[0])


def batches(steps: Iterable[Step]) -> Iterator[list[Step]]:
    """Yield the steps in transactions that ZooKeeper takes."""
    batch: list[Step] = []
    for step in steps:
        if batch and (len(batch) >= MAX_STEPS or size_of([*batch, step]) > MAX_REQUEST // 2):
            yield batch
            batch = []
        batch.append(step)
    if batch:
        yield batch


def begin(client: Any, steps: Sequence[Step]) -> Any:
    """Send `steps`; the answer of the asynchronous result is for :func:`verdict`."""
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
    """Return the answers of a transaction, or raise the reason of its refusal."""
    if isinstance(answers, Exception):
        raise answers
    for index, answer in enumerate(answers):
        if isinstance(answer, Exception) and not isinstance(answer, RolledBackError | RuntimeInconsistency):
            if isinstance(answer, NoAuthError | InvalidACLError):
                raise failure_of(steps[index].kind, steps[index].path, answer)
            raise TransactionRefused.at(index, steps[index], answer)
    result: list[Any] = answers
    return result


def failure_of(kind: str, path: str, error: Exception) -> Exception:
    """Return the exception to raise after the answer `error` to a request `kind` at `path`.

    If an ACL denies the session, this is an AccessDenied. A missing folder means that the whole chroot was
    deleted: this is a ZooKeeperUnreachable, because the next request creates the chroot again.
    """
    if isinstance(error, NoAuthError | InvalidACLError):
        denial = AccessDenied(
            f"ZooKeeper does not let this session {kind} {path} ({type(error).__name__}): give the "
            "credentials that the ACL of the path asks for, as auth=[('digest', 'user:password')] or sasl={…}"
        )
        denial.path = path
        return denial
    if isinstance(error, NoNodeError):
        return ZooKeeperUnreachable(
            f"ZooKeeper could not {kind} {path}, because its chroot was deleted: the next request creates "
            "it again"
        )
    return error


def ask_all(session: Session, send: Callable[[Any], Sequence[Any]], timeout_s: float) -> list[Any]:
    """Send several requests at once.

    Args:
        session: Opened if necessary.
        send: Receives the client and returns kazoo's asynchronous results.
        timeout_s: Seconds to wait for each answer.

    Returns:
        For each request its answer, or the exception that is its answer.

    Raises:
        ZooKeeperUnreachable: A request got no answer. Any of the requests may have been carried out.
        ConfigurationError: The server refused the credentials.
    """
    client = session.open(timeout_s)
    return [answer_of(session, client, pending, timeout_s) for pending in send(client)]


def answer_of(session: Session, client: Any, pending: Any, timeout_s: float) -> Any:
    """Wait for the answer to one request of :func:`ask_all`."""
    try:
        return session.answer(client, pending, timeout_s)
    except KazooException as error:
        return error
