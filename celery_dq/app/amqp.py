"""``app.amqp``: wires in every connection, a checked tenant and priority on every publish.

``before_task_publish`` would see every publish too, but Celery's signals log what a receiver raises
and publish all the same; and they do not say which app publishes. The task sender is per app, is
passed by ``apply_async``, ``send_task``, beat, retries and canvas alike, and lets an error through
to the caller.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from celery._state import get_current_task
from kombu import pools

from celery_dq.app.duplicates import CALL_OPTION, DedupRules, conclude, ticket_for
from celery_dq.app.face import dq_of
from celery_dq.app.punctual import punctual_connection
from celery_dq.app.watched import LEARN_OPTION, Watched
from celery_dq.hooks import CLAIM_HEADER, DEDUP, WIRES
from celery_dq.producer.stand_in import StandIn
from celery_dq.transport.aliases import TENANT_SCHEMES, register_transports
from celery_dq.transport.tenant import Rule, check_priority, check_tenant, tenant_rule

#: Queues that an app remembers as declared.
MOST_DECLARED = 10_000


class WiredAMQP:
    """Mixed over the app's AMQP class by ``celery_dq.setup``."""

    app: Any
    _producer_pool: Any

    def Connection(self, *args: Any, **kwargs: Any) -> Any:  # noqa: N802 - Celery's name
        """Return a kombu connection whose transport finds this app's wires.

        Raises:
            ConfigurationError: A ``dq_*`` option is unusable: here, so that a worker and a producer
                learn it when they start, before they open a socket.
        """
        register_transports()  # this process may have got its app by unpickling
        wires = dq_of(self.app).wires
        wires.options  # noqa: B018 - resolves them
        options = dict(kwargs.pop("transport_options", None) or {})
        options.setdefault(WIRES, wires)
        connection = super().Connection  # type: ignore[misc]  # of Celery's AMQP, beside which this is mixed
        return connection(*args, transport_options=options, **kwargs)

    BrokerConnection = Connection  # Celery's old name for it

    @property
    def producer_pool(self) -> Any:
        """Celery's pool of producers, on connections that answer in time."""
        if self._producer_pool is None:
            face = dq_of(self.app)
            connection = punctual_connection(self.app, face.options.publishing.step_s)
            if face.options.publishing.timeout_us:
                # Where a call says retry=False it means it: kombu would try to connect for some seconds.
                connection.transport_options.setdefault("max_retries", max(len(connection.alt) - 1, 0))
                connection.transport_options.setdefault("errback", face.deadline)
            self._producer_pool = pools.producers[connection]
            self._producer_pool.limit = self.app.pool.limit
        return self._producer_pool

    publisher_pool = producer_pool  # Celery's old name for it

    def _create_task_sender(self) -> Callable[..., Any]:
        send: Callable[..., Any] = super()._create_task_sender()  # type: ignore[misc]  # of Celery's AMQP
        tenant_of = TenantRules(self.app).tenant_of
        dedup_rules = DedupRules(self.app)
        declared: set[str] = set()

        def send_task_message(producer: Any, name: str, message: Any, **options: Any) -> Any:
            tenant = options.pop("tenant", None)
            if tenant is None:
                tenant = tenant_of(name, message)
            else:
                tenant = check_tenant(tenant, where=f"{name}: tenant")
            if tenant:
                options["tenant"] = tenant
            priority = options.get("priority")
            if priority is not None:
                check_priority(priority, where=f"{name}: priority")
            queue = options.get("queue")
            if queue is not None and options.get("declare") is None and _needs_no_binding(producer, queue):
                # A queue is declared once: kombu copies it for that at every publish, a fifth of its cost.
                if queue.name in declared:
                    options["declare"] = ()
                elif len(declared) < MOST_DECLARED:
                    declared.add(queue.name)
            published = options.pop(LEARN_OPTION, None)
            if published is not None:
                producer = Watched(producer, published)
            slip = options.pop(CALL_OPTION, None)
            found = dedup_rules.find(name, options.pop("dedup", None))
            if found is None:
                return send(producer, name, message, **options)
            rule, key = found
            if isinstance(producer, StandIn):
                # Its sender knows what becomes of the ticket; the verdict comes after the call.
                return send(
                    producer, name, message, **{DEDUP: ticket_for(rule, key, message, None)}, **options
                )
            ticket = ticket_for(rule, key, message, slip)
            if not _is_ours(producer):
                # The worker that receives it gives the verdict.
                message.headers[CLAIM_HEADER] = ticket.claim_header()
                return send(producer, name, message, **options)
            if slip is not None:
                slip.ticket = ticket
            sent = send(producer, name, message, **{DEDUP: ticket}, **options)
            conclude(self.app, name, message.headers["id"], rule, ticket)
            return sent

        return send_task_message


def _needs_no_binding(producer: Any, queue: Any) -> bool:
    """Whether Celery publishes to *queue* by its name, and to the tenant broker."""
    exchange = getattr(queue, "exchange", None)
    if exchange is None or exchange.type != "direct":
        return False
    return getattr(producer.connection, "transport_cls", "") in TENANT_SCHEMES


def _is_ours(producer: Any) -> bool:
    """Whether the broker gives verdicts."""
    return getattr(producer.connection, "transport_cls", "") in TENANT_SCHEMES


class TenantRules:
    """The tenants that the tasks of one app name for their calls, compiled at first use."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._compiled: dict[str, tuple[Any, Rule | None]] = {}

    def tenant_of(self, name: str, message: Any) -> str:
        """Return the tenant of a call for which the caller named none.

        A retry keeps the tenant of the run that it repeats. Else the task's ``tenant`` option says.

        Raises:
            ConfigurationError: The option cannot be used for this task.
            InvalidTenant: What it gives for this call is no tenant.
        """
        headers, _, body, _ = message
        if headers.get("retries"):
            inherited = self._of_retried(headers["id"])
            if inherited is not None:
                return inherited
        rule = self.rule(name)
        if rule is None:
            return ""
        if isinstance(body, dict):  # task protocol 1
            args, kwargs = body["args"], body["kwargs"]
        else:
            args, kwargs = body[0], body[1]
        return check_tenant(rule(args, kwargs), where=f"tenant of task {name}")

    def _of_retried(self, task_id: str) -> str | None:
        running = get_current_task()
        if running is None or running.request.id != task_id:
            return None
        properties = running.request.properties
        return check_tenant(properties.get("tenant")) if properties else None

    def rule(self, name: str) -> Rule | None:
        """Return the compiled ``tenant`` option of the task, None when it has none."""
        app = self._app
        # An app that must not finalize itself is asked only for what it has registered.
        tasks = app.tasks if app.finalized or app.autofinalize else app._tasks
        task = tasks.get(name)
        if task is None:  # registered in other processes only
            return None
        known = self._compiled.get(name)
        if known is None or known[0] is not task:
            known = self._compiled[name] = (task, tenant_rule(_option(task), name, task.run))
        return known[1]


def _option(task: Any) -> Any:
    """Return the ``tenant`` option as it was written, not as a bound method."""
    written = inspect.getattr_static(type(task), "tenant", None)
    if inspect.isfunction(written) and next(iter(inspect.signature(written).parameters), "") != "self":
        # `@app.task(tenant=lambda args, kwargs: …)`: Celery makes the option a class attribute.
        return written
    return getattr(task, "tenant", None)
