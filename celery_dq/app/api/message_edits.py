"""Changes of a task that waits: its place and its arguments; the body of a stored task."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, NamedTuple, Protocol

from celery.utils.saferepr import saferepr
from kombu import compression, serialization

from celery_dq.errors import InvalidMessage, InvalidRequest, described
from celery_dq.inspector.messages import Located, find_located
from celery_dq.inspector.redis_values import Client
from celery_dq.transport import envelope
from celery_dq.transport.message_record import MessageRecord
from celery_dq.transport.redis.store.partition import Edited, Partition
from celery_dq.transport.redis.store.script_calls import run_all
from celery_dq.transport.redis.store.whole_queue import likely_first

#: The states of a task whose arguments may change; an outcome that is one of them is a change.
CHANGED = ("waiting", "delayed", "blocked")
#: An outcome of a higher rank says more. An in-flight message, which is ``other``, may have another message
#: with its id that waits, of another tenant.
_RANKS: tuple[Edited, ...] = ("none", "other", "expires", "blocked", "delayed", "waiting")
#: How often a message is read again that was changed between its reading and its writing.
_TRIES = 3


class EditMessage(Protocol):
    """A change of one task in the partitions of its queue."""

    def __call__(self, partitions: Sequence[Partition], client: Client, task_id: str) -> Edited:
        """Make the change, and return the state of the task."""
        ...


def edit_place(partitions: Sequence[Partition], client: Client, task_id: str, **changes: int) -> Edited:
    """Change when a task is due, or its priority; `changes` as for :meth:`Partition.edit`.

    Raises:
        InvalidRequest: The task expires before it would be due.
    """
    # A partition without the task changes nothing.
    outcome: Edited = "none"
    for some in likely_first(partitions, task_id):
        if outcome in ("none", "other"):
            outcomes = run_all([partition.edit(task_id, **changes) for partition in some], client)
            outcome = max([outcome, *outcomes], key=_RANKS.index)
    if outcome == "expires":
        raise InvalidRequest(
            f"reschedule: task {task_id} expires before that, and would not run; give an earlier time"
        )
    return outcome


class Arguments(NamedTuple):
    """The arguments of a task; None for those that are not JSON."""

    args: Any
    kwargs: Any


def editable_arguments(partitions: Sequence[Partition], client: Client, task_id: str) -> Arguments | None:
    """Read the arguments of a task that waits."""
    found = _located(partitions, client, task_id)
    if found is None or found.message.state not in CHANGED:
        return None
    record = MessageRecord.unpack(found.record)
    return Arguments(*shown_arguments(record.envelope, record.body))


def edit_arguments(
    partitions: Sequence[Partition],
    client: Client,
    task_id: str,
    changes: Mapping[str, Any],
    accept: Collection[str],
    tasks: Mapping[str, Any],
) -> Edited:
    """Change ``args`` or ``kwargs`` of a task; `accept` and `tasks` as for :func:`with_arguments`.

    Raises:
        InvalidMessage: The body cannot be decoded or encoded, or the arguments do not fit the task.
    """
    for _ in range(_TRIES):
        found = _located(partitions, client, task_id)
        if found is None or found.message.state in ("dead", "cancelled"):
            return "none"
        message, _, before = found
        if message.state not in CHANGED:
            return "other"
        record = MessageRecord.unpack(before)
        packed, body = with_arguments(record.envelope, record.body, changes, accept, tasks)
        after = record._replace(envelope=packed, body=body).pack()
        call = partitions[message.partition].edit_record(task_id, before, after)
        outcome: Edited = call.run(client)
        if outcome in CHANGED:
            return outcome
    return "other"


def _located(partitions: Sequence[Partition], client: Client, task_id: str) -> Located | None:
    """Find the message of a task in a queue, one that waits before one that does not."""
    found: list[Located] = []
    for some in likely_first(partitions, task_id):
        found += find_located(some, client, task_id)
        if found and found[-1].message.state in CHANGED:
            return found[-1]
    return found[0] if found else None


#: The content type of a message that names none.
JSON = "application/json"
#: Characters of Celery's representation of arguments.
REPR_SIZE = 1024
#: Bytes of the longest body that is decompressed.
MAX_BODY = 32 * 1024 * 1024
#: The classes of the compression libraries that decompress within a bound, with their arguments.
_DECOMPRESSORS: dict[str, dict[str, Any]] = {
    "decompressobj": {},
    "BZ2Decompressor": {},
    "LZMADecompressor": {"memlimit": 128 * 1024 * 1024},
    "ZstdDecompressor": {},
}
#: The representation of changed arguments whose caller had chosen a text for the former ones.
EDITED = "(edited)"


def check_changes(changes: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raise :exc:`~celery_dq.errors.InvalidMessage` for a change that cannot be made."""
    unknown = sorted(changes.keys() - {*known})
    if unknown:
        raise InvalidMessage(f"edit: {unknown[0]!r} cannot be changed: only {', '.join(known)}")
    args, kwargs, eta = changes.get("args", []), changes.get("kwargs", {}), changes.get("eta")
    if not isinstance(args, (list, tuple)):
        raise InvalidMessage(f"edit: args = {args!r}: give a list")
    if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in kwargs):
        raise InvalidMessage(f"edit: kwargs = {kwargs!r}: give a dict with texts as keys")
    if eta is not None and not isinstance(eta, datetime):
        raise InvalidMessage(f"edit: eta = {eta!r}: give a datetime, or None for at once")


def read_body(packed: bytes, raw: str | bytes, accept: Collection[str]) -> Any:
    """Return the decoded body of a message.

    Args:
        packed: Its envelope.
        raw: Its body as stored, which may be compressed.
        accept: Content types that may be decoded. A decoded pickle runs code that its publisher has chosen.

    Raises:
        InvalidMessage: The content type is not in `accept`, or the body cannot be decoded.
    """
    headers, _, content_type, encoding = envelope.unpack(packed)
    kind = content_type or JSON
    if kind not in accept:
        raise InvalidMessage(
            f"the message has content type {kind!r}, and accept_content has {sorted(accept)}: its arguments "
            "are not decoded"
        )
    squeezed = headers.get("compression")
    # Each library of a serializer or a compression has errors of its own.
    try:
        data = raw
        if squeezed:
            data = _decompressed(raw.encode() if isinstance(raw, str) else raw, squeezed)
        return serialization.loads(data, kind, encoding or "utf-8", accept={kind})
    except Exception as exc:
        how = f"{kind}, compression {squeezed!r}" if squeezed else kind
        raise InvalidMessage(f"the body of the message ({how}) cannot be decoded: {described(exc)}") from exc


def _decompressed(body: bytes, squeezed: str) -> bytes:
    """Decompress a body, as kombu does, but only up to `MAX_BODY`: a few bytes can stand for gigabytes."""
    library = sys.modules[compression.get_decoder(squeezed).__module__]
    name = next((name for name in _DECOMPRESSORS if hasattr(library, name)), None)
    if name is None:
        raise InvalidMessage("its size cannot be bounded, so it is not decompressed")
    stream: Any = getattr(library, name)(**_DECOMPRESSORS[name])
    found: bytes = stream.decompress(body, MAX_BODY + 1)
    if len(found) > MAX_BODY:
        raise InvalidMessage(f"it has more than {MAX_BODY:,} bytes")
    if not stream.eof:
        raise InvalidMessage("it ends early")
    return found


def shown_arguments(packed: bytes, raw: str | bytes) -> tuple[Any, Any]:
    """Return ``args`` and ``kwargs`` of a task in JSON; None and None for any other content."""
    # The body may be of a program that has another form of messages.
    with suppress(Exception):
        args, kwargs, _ = read_body(packed, raw, {JSON})
        return args, kwargs
    return None, None


def with_arguments(
    packed: bytes,
    raw: str | bytes,
    changes: Mapping[str, Any],
    accept: Collection[str],
    tasks: Mapping[str, Any],
) -> tuple[bytes, str | bytes]:
    """Return envelope and body with other ``args`` or ``kwargs``, in the same serializer and compression.

    Args:
        packed: The envelope.
        raw: The body as stored.
        changes: The new ``args`` and ``kwargs``; without both, the message stays as it is.
        accept: As for :func:`read_body`.
        tasks: The tasks of the app, by name. The arguments of other tasks are not checked.

    Raises:
        InvalidMessage: The body cannot be decoded or encoded, or is of no task, or the arguments do not fit
            the task.
    """
    if "args" not in changes and "kwargs" not in changes:
        return packed, raw
    body = read_body(packed, raw, accept)
    if not (
        isinstance(body, (list, tuple))
        and len(body) == 3
        and isinstance(body[0], (list, tuple))
        and isinstance(body[1], Mapping)
    ):
        raise InvalidMessage(
            "edit: the message is not a Celery task of protocol 2, its arguments are not known"
        )
    headers, properties, content_type, _ = envelope.unpack(packed)
    args = list(changes["args"] if "args" in changes else body[0])
    kwargs = dict(changes["kwargs"] if "kwargs" in changes else body[1])
    _check_signature(tasks.get(str(headers.get("task"))), args, kwargs)
    squeezed = headers.get("compression")
    try:
        payload: str | bytes
        kind, encoding, payload = serialization.dumps(
            (args, kwargs, body[2]), _serializer(content_type or JSON)
        )
        if squeezed:
            payload, headers["compression"] = compression.compress(payload, squeezed)
    except Exception as exc:
        raise InvalidMessage(f"edit: the new arguments cannot be encoded: {described(exc)}") from exc
    if "args" in changes:
        headers["argsrepr"] = _shown(headers.get("argsrepr"), tuple(body[0]), tuple(args))
    if "kwargs" in changes:
        headers["kwargsrepr"] = _shown(headers.get("kwargsrepr"), body[1], kwargs)
    return envelope.pack(headers, properties, kind, encoding), payload


def _check_signature(task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Check arguments as ``apply_async`` does, which leaves out tasks with ``typing = False``."""
    # Only a task that was made of a function has the checker.
    check = getattr(task, "__header__", None)
    if check is not None and task.typing:
        try:
            check(*args, **kwargs)
        except TypeError as exc:
            raise InvalidMessage(
                f"edit: the new arguments do not fit task {task.name!r}: {exc}; give arguments that the task "
                "takes"
            ) from exc


def _shown(text: str | None, before: Any, after: Any) -> str:
    """Return the representation of new arguments for logs and monitors.

    A text that its caller has chosen may hide the arguments, so the new ones are not shown, either.
    """
    if text is None or text == saferepr(before, REPR_SIZE):
        return saferepr(after, REPR_SIZE)
    return EDITED


def _serializer(content_type: str) -> str:
    """Return kombu's name of the serializer for this content type."""
    registry: Any = serialization.registry  # type: ignore[attr-defined]  # not in kombu's stubs
    name = registry.type_to_name.get(content_type)
    if name is None:
        raise InvalidMessage(f"edit: no serializer is registered for content type {content_type!r}")
    return str(name)
