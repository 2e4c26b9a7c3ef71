"""Dedup where calls are made: the key of a call, its dedup request to the broker, and the caller's result.

Every call passes ``app.amqp``'s task sender, whether it comes from ``apply_async``, ``send_task``, beat, a
canvas or a retry. The task sender makes the dedup request. :class:`DedupStage`, above it, decides on the
result: a caller that did not choose the task id gets the result of the covering call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kombu import serialization

from celery_dq.app.publishing.pipeline import Call, Proceed
from celery_dq.compat.celery_calls import arguments_of, continued_run, task_named
from celery_dq.dedup.key import AsSent, Key, MakeKey
from celery_dq.dedup.machine import Verdict
from celery_dq.dedup.rule import Dedup, override, rule_of
from celery_dq.dedup.signals import verdict_given
from celery_dq.errors import ConfigurationError, DuplicateCall
from celery_dq.protocols import DEDUP_HEADER
from celery_dq.shown import shown_logger
from celery_dq.transport.message_record import DedupSection
from celery_dq.transport.redis.store.message_ids import delivery_of, task_id_of

logger = shown_logger(__name__)

_VERDICTS = {
    "accepted": Verdict.ACCEPT,
    "seen": Verdict.ACCEPT,
    "blocked": Verdict.BLOCK,
    "declined": Verdict.DECLINE,
    "following": Verdict.DECLINE,
    "refused": Verdict.DECLINE,
}


@dataclass(slots=True, eq=False)
class DedupCallRequest:
    """The call's side of :class:`celery_dq.protocols.DedupRequest`.

    Attributes:
        section: for the record, see :class:`~celery_dq.transport.message_record.DedupSection`.
        key: the dedup key.
        verdict: None until the broker has answered; it also stays None for a task that was revoked before.
        covering: task id of the call that covers a declined call, or is ahead of a blocked one.
        replaced: task id of the call that lost its place to this one, or ``""``.
        refused: the call asked to follow another one, which has too many followers already.
    """

    section: bytes
    key: str
    verdict: Verdict | None = None
    covering: str = ""
    replaced: str = ""
    refused: bool = False

    def dedup_header(self) -> dict[str, Any]:
        """Return the header from which a worker on another broker requests the dedup lock."""
        return DedupSection.unpack(self.section).header()

    def receive_verdict(self, status: str, message_id: str, covering: str, replaced: str) -> None:
        """See :meth:`celery_dq.protocols.DedupRequest.receive_verdict`."""
        self.verdict = _VERDICTS.get(status)
        self.covering = task_id_of(covering or message_id)
        self.replaced = task_id_of(replaced) if replaced else ""
        self.refused = status == "refused"


class DedupRules:
    """The dedup rules of the tasks of one app, compiled at first use."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._compiled: dict[str, tuple[Any, Dedup | None, Key | None]] = {}

    def find(
        self, name: str, option: Any, task_id: Any = None, args: Any = None, kwargs: Any = None
    ) -> tuple[Dedup, MakeKey] | None:
        """Return the rule and the key maker of a call; None when it takes no part in dedup.

        A run that publishes itself again, by a retry or ``replace``, has the key of its message, or none as
        its message: of the arguments that the worker has read, the rule may make another key.

        Args:
            name: the task.
            option: the call's own ``dedup``, see :func:`celery_dq.dedup.rule.override`.
            task_id: the id of the call.
            args: its positional arguments.
            kwargs: its named arguments.

        Raises:
            ConfigurationError: The rule cannot be used for this task.
        """
        found = self._find(name, option)
        if option is None:
            request = _request_repeated_by(name, task_id, args or (), kwargs or {})
            if request is not None:
                return _of_message(request.get(DEDUP_HEADER), found)
        return found

    def has_rule(self, name: str) -> bool:
        """Whether the calls of a task have a key, unless a call is excluded."""
        return self._find(name, None) is not None

    def _find(self, name: str, option: Any) -> tuple[Dedup, MakeKey] | None:
        task = task_named(self._app, name)
        known = self._compiled.get(name)
        if known is None or known[0] is not task:
            rule = rule_of(task) if task is not None else None
            key = None if rule is None else Key(rule.name or name, task.run, rule.key)
            known = self._compiled[name] = (task, rule, key)
        _, rule, key = known
        if option is not None:
            rule = override(rule, option, where=f"task {name}")
            if rule is not None:
                # Without the task's signature a key template is filled from the keyword arguments.
                run = task.run if task is not None else _anything
                key = Key(rule.name or name, run, rule.key)
        return None if rule is None or key is None else (rule, key)


def _anything(*args: Any, **kwargs: Any) -> None:
    """Stand in for a task whose signature is not known in this process."""


def _request_repeated_by(name: str, task_id: Any, args: Any, kwargs: Any) -> Any:
    """Return the request of the run that the call repeats; else None."""
    run = continued_run(task_id)
    if run is None or run.name != name:
        return None
    request = run.request
    # By the text, because 1 == True.
    same = repr((tuple(args), kwargs)) == repr((tuple(request.args or ()), request.kwargs or {}))
    return request if same else None


def _of_message(header: Any, found: tuple[Dedup, MakeKey] | None) -> tuple[Dedup, MakeKey] | None:
    """Return the rule and the key of a message; `found` are those of its task."""
    if not header:
        return None
    try:
        key, timeout, waiting = str(header["key"]), header["timeout"], header["waiting"]
        raises = found is not None and found[0].on_duplicate == "raise"
        rule = Dedup(None, timeout, "raise" if raises else header["policy"], waiting)
    except (ConfigurationError, KeyError, TypeError):
        return found  # another program has written the header
    return rule, lambda args, kwargs, as_sent: key


def as_sent_by(serializer: str) -> AsSent:
    """Return the function that gives a value as the worker reads it from a message of this serializer."""

    def as_sent(value: Any) -> Any:
        try:
            kind, encoding, payload = serialization.dumps(value, serializer)
            return serialization.loads(payload, kind, encoding, accept={kind})
        except Exception:
            # The publish raises the error for an argument. The value of a callable need not be sent.
            return value

    return as_sent


def dedup_request_for(
    rule: Dedup, key: MakeKey, message: Any, *, named: bool, serializer: str
) -> DedupCallRequest:
    """Make the dedup request of a call from its message, and put the rule's time limit on the message.

    Args:
        rule: the dedup rule of the call.
        key: its key maker.
        message: the message, as Celery made it.
        named: the caller, a chain, chord or group knows the task id.
        serializer: the serializer of the message.

    Raises:
        InvalidKey: No key can be made of its arguments.
    """
    headers = message[0]
    args, kwargs, embed = arguments_of(message)
    get = embed.get
    attached = bool(get("callbacks") or get("errbacks") or get("chain") or get("chord"))
    awaited = attached or not headers.get("ignore_result")
    seconds = rule.seconds
    if seconds is not None:
        hard, soft = headers.get("timelimit") or (None, None)
        # Less than the timeout, so that the pool ends the task before the broker passes its key on.
        limit = max(seconds - 1.0, seconds * 0.9)
        headers["timelimit"] = [limit if hard is None else min(hard, limit), soft]
    text = key(args or (), kwargs or {}, as_sent_by(serializer))
    section = _section(
        rule,
        text,
        attached=attached,
        awaited=awaited,
        named=named,
        continues=_continued_run(headers.get("id")),
    )
    return DedupCallRequest(section, text)


def _section(
    rule: Dedup,
    key: str,
    *,
    awaited: bool,
    named: bool,
    attached: bool = False,
    continues: tuple[str, int] = ("", 0),
) -> bytes:
    seconds = rule.seconds
    return DedupSection(
        key,
        timeout_us=0 if seconds is None else max(int(seconds * 1e6), 1),
        replace=rule.on_duplicate == "replace",
        waiting=rule.waiting == 1,
        follow=(attached or (named and awaited)) and rule.on_duplicate != "raise",
        awaited=awaited,
        continues=continues,
    ).pack()


class DedupRequests:
    """Makes the dedup requests of plain calls of one kind, which differ only in their key.

    A plain call has no link, chain, chord or group, and no running task makes it.

    Attributes:
        rule: of the task.
        key: its key maker.
    """

    __slots__ = ("_as_sent", "_starts", "key", "rule")

    def __init__(self, rule: Dedup, key: MakeKey, first: DedupCallRequest, serializer: str) -> None:
        self.rule = rule
        self.key = key
        self._as_sent = as_sent_by(serializer)
        awaited = DedupSection.unpack(first.section).awaited
        # A section ends with its key.
        self._starts = tuple(_section(rule, "", awaited=awaited, named=named) for named in (False, True))

    def request_for(self, args: Any, kwargs: Any, *, named: bool) -> DedupCallRequest:
        """Make the dedup request of a call.

        Raises:
            InvalidKey: No key can be made of its arguments.
        """
        text = self.key(args or (), kwargs or {}, self._as_sent)
        return DedupCallRequest(self._starts[named] + text.encode(), text)


def _continued_run(task_id: Any) -> tuple[str, int]:
    """Message id and claim number of the run that is published again, by ``retry`` or ``replace``."""
    run = continued_run(task_id)
    if run is None:
        return "", 0
    properties = run.request.properties or {}
    delivery = delivery_of(str(properties.get("delivery_tag") or ""))
    return ("", 0) if delivery is None else (delivery.message_id, int(delivery.claim))


def conclude_verdict(name: str, task_id: str, rule: Dedup, request: DedupCallRequest) -> None:
    """Send the signal of a verdict, and log or raise a decline.

    Args:
        name: The name of the task.
        task_id: The id of the call.
        rule: The dedup rule of the task, or of the call.
        request: The dedup request with its verdict.

    Raises:
        DuplicateCall: The call was declined, and either the rule raises on duplicates or the covering call
            has too many followers.
    """
    if request.verdict is None:
        return
    if verdict_given.receivers:
        verdict_given.send(
            sender=name,
            verdict=request.verdict,
            key=request.key,
            task_id=task_id,
            covering=request.covering,
            replaced=request.replaced,
        )
    if request.verdict is not Verdict.DECLINE:
        return
    logger.info(
        "Call %s[%s] was declined: %s covers it (%s).",
        name,
        task_id,
        request.covering,
        request.key,
        extra={"event": "dedup_call_declined"},
    )
    if request.refused:
        raise DuplicateCall(
            f"{name}: {request.covering} covers this call ({request.key}), and too many calls wait for its "
            "result already: publish fewer duplicates with a chain, chord, group, link or own task id"
        )
    if rule.on_duplicate == "raise":
        raise DuplicateCall(f"{name}: {request.covering} covers this call ({request.key})")


class DedupStage:
    """The stage that finds the dedup rule of a call, and gives the caller the result of the covering call.

    A call with a dedup key returns a result with ``.verdict`` and ``.covering``. When it was declined and the
    caller chose no task id, the result is that of the covering call.

    Args:
        app: A Celery app.
    """

    def __init__(self, app: Any) -> None:
        self._app = app
        self._rules = DedupRules(app)

    def send(self, call: Call, proceed: Proceed) -> Any:
        """See :class:`celery_dq.app.publishing.pipeline.Stage`.

        Raises:
            ConfigurationError: The rule cannot be used for this task.
        """
        options = call.options
        call.dedup = self._rules.find(
            call.name, options.get("dedup"), options.get("task_id"), call.args, call.kwargs
        )
        return self.answer(call, proceed(call))

    def answer(self, call: Call, result: Any) -> Any:
        """Return the result that the caller gets for Celery's result of the call."""
        request = call.request
        if request is None or request.verdict is None:
            return result
        if request.verdict is Verdict.DECLINE and not call.named:
            app = self._app
            covering = type(result)(request.covering, app=app, backend=getattr(result, "backend", None))
            covering.ignored = result.ignored
            _correct_trail(app, result, covering)
            result = covering
        result.verdict = request.verdict
        result.covering = request.covering
        return result


def _correct_trail(app: Any, declined: Any, covering: Any) -> None:
    """Put the covering result among the children of the calling task, where Celery put the declined one."""
    parent = app.current_worker_task
    children = parent.request.children if parent is not None else None
    if children and children[-1] is declined:
        children[-1] = covering
