"""Dedup where calls are made: the key of a call, its ticket to the broker, and what the caller gets.

Every call passes ``app.amqp``'s task sender, whether it comes from ``apply_async``, ``send_task``, beat, a
canvas or a retry. There the ticket is written. What the caller of ``send_task`` gets is decided above it, in
:class:`CoveredCalls`: who did not choose the task id himself is handed the call that covers his.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from celery._state import _task_stack  # type: ignore[attr-defined]  # not in its stubs

from celery_dq.dedup.key import Key
from celery_dq.dedup.machine import Verdict
from celery_dq.dedup.rule import Dedup, override, rule_of
from celery_dq.dedup.signals import verdict_given
from celery_dq.errors import DuplicateCall
from celery_dq.transport.redis.ids import task_id_of
from celery_dq.transport.redis.record import DedupSection

__all__ = ["CALL_OPTION", "DedupRules", "Ticket", "Tickets", "conclude", "cover_calls", "covered"]

logger = logging.getLogger(__name__)

#: The option with which a call of ``send_task`` hands its slip down to the task sender.
CALL_OPTION = "dq_slip"

_VERDICTS = {
    "accepted": Verdict.ACCEPT,
    "seen": Verdict.ACCEPT,
    "blocked": Verdict.BLOCK,
    "declined": Verdict.DECLINE,
    "following": Verdict.DECLINE,
    "refused": Verdict.DECLINE,
}


class Slip:
    """Goes down with one call of ``send_task``, and comes up with its ticket.

    Attributes:
        named: the caller chose the task id, so he, or a chain, chord or group, holds it.
        ticket: set below, when the call has a dedup key.
    """

    __slots__ = ("named", "ticket")

    def __init__(self, named: bool) -> None:
        self.named = named
        self.ticket: Ticket | None = None


class Ticket:
    """The call's side of :class:`celery_dq.hooks.DedupTicket`.

    Attributes:
        section: for the record, see :class:`~celery_dq.transport.redis.record.DedupSection`.
        key: the dedup key.
        verdict: None until the broker has answered; it also stays None for a task that was revoked before.
        covering: task id of who covers a declined call, or is ahead of a blocked one.
        replaced: task id of who gave up its place, or ``""``.
        refused: the call was to follow another one, but too many do.
    """

    __slots__ = ("covering", "key", "refused", "replaced", "section", "verdict")

    def __init__(self, section: bytes, key: str) -> None:
        self.section = section
        self.key = key
        self.verdict: Verdict | None = None
        self.covering = ""
        self.replaced = ""
        self.refused = False

    def claim_header(self) -> dict[str, Any]:
        """Return what a worker on another broker must know."""
        says = DedupSection.unpack(self.section)
        return {
            "key": says.key,
            "timeout": says.timeout_us / 1e6 or None,
            "policy": "replace" if says.replace else "decline",
            "waiting": int(says.waiting),
        }

    def told(self, status: str, message_id: str, covering: str, replaced: str) -> None:
        """See :meth:`celery_dq.hooks.DedupTicket.told`."""
        self.verdict = _VERDICTS.get(status)
        self.covering = task_id_of(covering or message_id)
        self.replaced = task_id_of(replaced) if replaced else ""
        self.refused = status == "refused"


class DedupRules:
    """The dedup rules of the tasks of one app, compiled at first use."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._compiled: dict[str, tuple[Any, Dedup | None, Key | None]] = {}

    def find(self, name: str, option: Any) -> tuple[Dedup, Key] | None:
        """Return the rule and the key maker of a call; None when it takes no part in dedup.

        Arguments:
            name: the task.
            option: the call's own ``dedup``, see :func:`celery_dq.dedup.rule.override`.

        Raises:
            ConfigurationError: The rule cannot be used for this task.
        """
        app = self._app
        tasks = app.tasks if app.finalized or app.autofinalize else app._tasks
        task = tasks.get(name)
        known = self._compiled.get(name)
        if known is None or known[0] is not task:
            rule = rule_of(task) if task is not None else None
            key = None if rule is None else Key(rule.name or name, task.run, rule.key)
            known = self._compiled[name] = (task, rule, key)
        _, rule, key = known
        if option is not None:
            rule = override(rule, option, where=f"task {name}")
            if rule is not None:
                # A task that only other processes know: a template is filled from the keyword arguments.
                run = task.run if task is not None else _anything
                key = Key(rule.name or name, run, rule.key)
        return None if rule is None or key is None else (rule, key)


def _anything(*args: Any, **kwargs: Any) -> None:
    """Stands for a task whose signature is not known here."""


def ticket_for(rule: Dedup, key: Key, message: Any, slip: Slip | None) -> Ticket:
    """Make the ticket of a call from its message, and give it the task's time limit.

    Raises:
        InvalidKey: No key can be made of its arguments.
    """
    headers, _, body, _ = message
    if isinstance(body, dict):  # task protocol 1
        args, kwargs, embed = body["args"], body["kwargs"], body
    else:
        args, kwargs, embed = body
    get = embed.get
    attached = bool(get("callbacks") or get("errbacks") or get("chain") or get("chord"))
    awaited = attached or not headers.get("ignore_result")
    seconds = rule.seconds
    if seconds is not None:
        hard, soft = headers.get("timelimit") or (None, None)
        # A little less, so that the pool has ended it before the broker gives its key away.
        limit = max(seconds - 1.0, seconds * 0.9)
        headers["timelimit"] = [limit if hard is None else min(hard, limit), soft]
    text = key(args or (), kwargs or {})
    section = _section(
        rule,
        text,
        attached=attached,
        awaited=awaited,
        named=slip is None or slip.named,
        continues=_continued_run(headers.get("id")),
    )
    return Ticket(section, text)


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


class Tickets:
    """The tickets of plain calls of one kind, of which only the key is not known beforehand.

    Plain are calls without link, chain, chord or group that no running task makes.

    Attributes:
        rule: of the task.
        key: its key maker.
    """

    __slots__ = ("_starts", "key", "rule")

    def __init__(self, rule: Dedup, key: Key, first: Ticket) -> None:
        self.rule = rule
        self.key = key
        awaited = DedupSection.unpack(first.section).awaited
        # A section ends with its key.
        self._starts = tuple(_section(rule, "", awaited=awaited, named=named) for named in (False, True))

    def ticket(self, args: Any, kwargs: Any, *, named: bool) -> Ticket:
        """Make the ticket of a call.

        Raises:
            InvalidKey: No key can be made of its arguments.
        """
        text = self.key(args or (), kwargs or {})
        return Ticket(self._starts[named] + text.encode(), text)


def _continued_run(task_id: Any) -> tuple[str, int]:
    """Message id and claim number of the run that publishes itself anew, by ``retry`` or ``replace``."""
    running = _task_stack.top
    if running is None or running.request.id != task_id:
        return "", 0
    properties = running.request.properties or {}
    claim, slash, message_id = str(properties.get("delivery_tag") or "").partition("/")
    if not slash or not claim.isdigit():
        return "", 0
    return message_id, int(claim)


def conclude(app: Any, name: str, task_id: str, rule: Dedup, ticket: Ticket) -> None:
    """Tell the world about a verdict.

    Arguments:
        app: Whose call it was.
        name: Of the task.
        task_id: Of the call.
        rule: Of the task, or of the call.
        ticket: Has the verdict.

    Raises:
        DuplicateCall: It was declined, and the rule or too many followers say that this is an error.
    """
    if ticket.verdict is None:
        return
    if verdict_given.receivers:
        verdict_given.send(
            sender=name,
            verdict=ticket.verdict,
            key=ticket.key,
            task_id=task_id,
            covering=ticket.covering,
            replaced=ticket.replaced,
        )
    if ticket.verdict is not Verdict.DECLINE:
        return
    logger.info("Call %s[%s] is declined: %s covers it (%s).", name, task_id, ticket.covering, ticket.key)
    if ticket.refused or rule.on_duplicate == "raise":
        _stop_waiting(app, task_id)
    if ticket.refused:
        raise DuplicateCall(
            f"{name}: {ticket.covering} covers this call ({ticket.key}), and too many calls wait for its "
            "result already: publish fewer duplicates with a chain, chord, group, link or own task id"
        )
    if rule.on_duplicate == "raise":
        raise DuplicateCall(f"{name}: {ticket.covering} covers this call ({ticket.key})")


def cover_calls(app: Any) -> None:
    """Let ``app.send_task`` return the covering call's result for a declined one. To be called once."""
    app.send_task = CoveredCalls(app, app.send_task)


class CoveredCalls:
    """Stands in front of ``app.send_task``."""

    def __init__(self, app: Any, send_task: Callable[..., Any]) -> None:
        self._app = app
        self._send_task = send_task
        functools.update_wrapper(self, send_task)

    def __call__(self, name: str, args: Any = None, kwargs: Any = None, *more: Any, **options: Any) -> Any:
        """Send a task, as Celery's own method does.

        A call with a dedup key returns a result with ``.verdict`` and ``.covering``. When it was declined
        and the caller chose no task id, the result is that of the covering call.

        Raises:
            DuplicateCall: It was declined, and ``on_duplicate`` is ``"raise"``.
            InvalidKey: No key can be made of its arguments.
        """
        # countdown, eta and task_id may stand by position.
        slip = Slip(named=bool(options.get("task_id") or (len(more) > 2 and more[2])))
        result = self._send_task(name, args, kwargs, *more, **{CALL_OPTION: slip}, **options)
        ticket = slip.ticket
        return result if ticket is None else covered(self._app, result, ticket, named=slip.named)


def covered(app: Any, result: Any, ticket: Ticket, *, named: bool) -> Any:
    """Return what the caller gets for a call that was sent with this ticket.

    Arguments:
        app: Whose call it was.
        result: Celery's.
        ticket: Has the verdict.
        named: The caller chose the task id.
    """
    if ticket.verdict is None:
        return result
    if ticket.verdict is Verdict.DECLINE and not named:
        if not result.ignored:
            _stop_waiting(app, result.id)
        covering = type(result)(ticket.covering, app=app, backend=getattr(result, "backend", None))
        covering.ignored = result.ignored
        _correct_trail(app, result, covering)
        result = covering
    result.verdict = ticket.verdict
    result.covering = ticket.covering
    return result


def _correct_trail(app: Any, declined: Any, covering: Any) -> None:
    """The task that makes this call has noted it among its children."""
    parent = app.current_worker_task
    children = parent.request.children if parent is not None else None
    if children and children[-1] is declined:
        children[-1] = covering


def _stop_waiting(app: Any, task_id: str) -> None:
    """The backend had been told to expect a result under the id of the declined call."""
    consumer = getattr(app.backend, "result_consumer", None)
    if consumer is not None:
        consumer.cancel_for(task_id)
