"""``app.amqp``: the app's context in every connection, a checked tenant and priority on every publish.

A receiver of ``before_task_publish`` would see every publish too. But Celery logs the error of a receiver and
publishes all the same, and the signal does not name the app. Each app has one task sender, which
``apply_async``, ``send_task``, beat, retries and canvas all call. Its errors reach the caller.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

from kombu import Producer, pools
from kombu.exceptions import LimitExceeded

from celery_dq.app.api.api import dq_of
from celery_dq.app.publishing.call_tenants import CALLERS_TENANT, CallTenants
from celery_dq.app.publishing.dedup_stage import DedupRules, conclude_verdict, dedup_request_for
from celery_dq.app.publishing.pipeline import CALL_OPTION, Call
from celery_dq.app.timeouts import Deadline, connection_with_timeout, unchanged_attempts
from celery_dq.compat.celery_calls import arguments_of, continues_run
from celery_dq.compat.kombu_messages import publishing_by
from celery_dq.context import APP_CONTEXT
from celery_dq.errors import ConfigurationError, MissingLibrary
from celery_dq.producer.buffering_producer import BufferingProducer, RecordingProducer
from celery_dq.producer.sender import BrokerUnavailable
from celery_dq.protocols import CONTINUES, COUNTDOWN, DEDUP_HEADER, DEDUP_PROPERTY
from celery_dq.shown import why_unreadable
from celery_dq.transport.aliases import TENANT_SCHEMES, refuse_misspelt, register_transports
from celery_dq.transport.broker_url import refuse_unknown_options
from celery_dq.transport.redis.store.server_errors import BacklogFull
from celery_dq.transport.tenant import check_priority

#: Options that a call does not share with others of its kind.
OF_ONE_CALL = frozenset(("headers", "tenant", "dedup", "retry", "retry_policy"))
#: Limit of the queues that an app remembers as declared.
MOST_DECLARED = 10_000


class PooledProducer(Producer):
    """A producer whose connection stays in its pool when a call was refused by an answer of the broker."""

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        if isinstance(exc_val, BacklogFull):
            exc_type = exc_val = exc_tb = None
        super().__exit__(exc_type, exc_val, exc_tb)


class DQAmqp:
    """Mixed over the app's AMQP class by ``celery_dq.setup``."""

    app: Any
    #: The value of :attr:`send_task_message`, unless a program or tool has replaced it.
    task_sender: Callable[..., Any]
    _producer_pool: Any

    def Connection(self, *args: Any, **kwargs: Any) -> Any:  # noqa: N802 - Celery's name
        """Return a kombu connection whose transport finds this app's context.

        The errors are raised here so that a worker or producer ends at its start, before it opens a socket.

        Raises:
            ConfigurationError: A ``dq_*`` option is unusable, the URL's scheme is misspelt, or an option of
                the URL is unknown.
            MissingLibrary: The library of the transport is not installed.
        """
        register_transports()  # an unpickled app was not set up in this process
        url = args[0] if args else kwargs.get("hostname")
        refuse_misspelt(url)
        refuse_unknown_options(url)
        context = dq_of(self.app).context
        context.options  # noqa: B018 - resolves them
        options = dict(kwargs.pop("transport_options", None) or {})
        options.setdefault(APP_CONTEXT, context)
        connection = super().Connection  # type: ignore[misc]  # of Celery's AMQP, beside which this is mixed
        try:
            return connection(*args, transport_options=options, **kwargs)
        except ImportError as exc:
            raise MissingLibrary(str(exc)) from exc
        except ValueError as exc:
            url = url or self.app.conf.broker_write_url or self.app.conf.broker_url
            raise ConfigurationError(f"broker_url cannot be read: {why_unreadable(url, exc)}") from None
        except KeyError as exc:
            raise ConfigurationError(f"broker_url names an unknown transport: {exc.args[0]}") from exc

    BrokerConnection = Connection  # Celery's old name for it

    @property
    def producer_pool(self) -> Any:
        """Celery's pool of producers, on connections whose steps have a timeout."""
        if self._producer_pool is None:
            dq = dq_of(self.app)
            connection = connection_with_timeout(self.app, dq.options.publishing.step_s)
            if dq.options.publishing.timeout_us:
                # kombu would try to connect for some seconds even for a call with retry=False.
                connection.transport_options.setdefault("max_retries", max(len(connection.alt) - 1, 0))
                connection.transport_options.setdefault("errback", dq.deadline)
            self._producer_pool = pools.producers[connection]
            self._producer_pool.Producer = PooledProducer
            self._producer_pool.limit = self.app.pool.limit
            longest_s = self.app.conf.get("broker_pool_acquire_timeout")  # since Celery 5.7
            _limit_waits(self._producer_pool, dq.deadline, longest_s)
        return self._producer_pool

    publisher_pool = producer_pool  # Celery's old name for it

    def _create_task_sender(self) -> Callable[..., Any]:
        send: Callable[..., Any] = super()._create_task_sender()  # type: ignore[misc]  # of Celery's AMQP
        tenant_of = CallTenants(self.app).of_call
        dedup_rules = DedupRules(self.app)
        declared: set[str] = set()

        def send_task_message(producer: Any, name: str, message: Any, **options: Any) -> Any:
            if (options.get("retry_policy") or {}).get("max_retries") != math.inf:
                return publish(producer, name, message, **options)
            policy = dict(self.app.conf.task_publish_retry_policy or {}, **options["retry_policy"])
            waits = dq_of(self.app).deadline.publisher_that_waits(producer, policy)
            with unchanged_attempts(producer.connection), publishing_by(producer, waits):
                return publish(producer, name, message, **options)

        def publish(producer: Any, name: str, message: Any, **options: Any) -> Any:
            call: Call | None = options.pop(CALL_OPTION, None)
            if call is not None and call.represent is not None:
                for option in ("argsrepr", "kwargsrepr"):
                    options.pop(option, None)
                call.represent(message)
            ours = _is_ours(producer)
            buffered = isinstance(producer, BufferingProducer) and not ours
            if call is not None and call.published is not None:
                call.routed = {key: value for key, value in options.items() if key not in OF_ONE_CALL}
            args, kwargs, _ = arguments_of(message)
            named, noted = options.pop("tenant", None), options.pop(CALLERS_TENANT, None)
            tenant = tenant_of(name, named, args, kwargs, message.headers, noted)
            if tenant:
                options["tenant"] = tenant
            priority = options.get("priority")
            if priority is not None:
                check_priority(priority, where=f"{name}: priority")
            queue = options.get("queue")
            if queue is not None and options.get("declare") is None and ours and _needs_no_binding(queue):
                # Declare a queue once: kombu would copy it at every publish, a fifth of the publish's cost.
                if queue.name in declared:
                    options["declare"] = ()
                elif len(declared) < MOST_DECLARED:
                    declared.add(queue.name)
            if call is not None and call.counts and (buffered or ours):
                options[COUNTDOWN] = True
            if call is not None and (buffered or ours) and continues_run(call.options):
                # A refusal would end a chain, or let the worker wait for room that only workers make.
                options[CONTINUES] = True
            request = None
            found = dedup_rules.find(
                name, options.pop("dedup", None), message.headers.get("id"), args, kwargs
            )
            if found is not None:
                # The buffer's sender passes the dedup request on, and the verdict comes after the call.
                named = buffered or call is None or call.named
                serializer = options.get("serializer") or self.app.conf.task_serializer
                request = dedup_request_for(*found, message, named=named, serializer=serializer)
                if buffered or ours:
                    options[DEDUP_PROPERTY] = request
                else:
                    # The worker that receives the message gives the verdict.
                    message.headers[DEDUP_HEADER] = request.dedup_header()
                if ours and call is not None:
                    call.request = request
            elif not ours and dedup_rules.has_rule(name):
                # The call is excluded. Without the header a worker would go by the rule of the task.
                message.headers[DEDUP_HEADER] = {}
            if call is not None and call.published is not None:
                call.headers = deepcopy(message.headers)
                producer = RecordingProducer(producer, call.published)
            sent = send(producer, name, message, **options)
            if ours and found is not None and request is not None:
                conclude_verdict(name, message.headers["id"], found[0], request)
            return sent

        self.task_sender = send_task_message
        return send_task_message


def _needs_no_binding(queue: Any) -> bool:
    """Whether Celery publishes to *queue* by its name."""
    exchange = getattr(queue, "exchange", None)
    return exchange is not None and exchange.type == "direct"


def _is_ours(producer: Any) -> bool:
    """Whether the broker gives verdicts."""
    return getattr(producer.connection, "transport_cls", "") in TENANT_SCHEMES


def _limit_waits(producers: Any, deadline: Deadline, longest_s: float | None) -> None:
    """Let the waits for a producer of a pool, and for its connection, end with the time of the call.

    Args:
        producers: a pool of kombu. Methods are replaced on it, and on its pool of connections.
        deadline: the deadline of the app's calls.
        longest_s: seconds that any wait may take; None without a limit.
    """
    # The methods of the class are called, so that a replacement on the instance is never wrapped again.
    for pool in (producers, producers.connections):
        pool.acquire = partial(_acquire_in_time, pool, deadline, longest_s)
    producers.prepare = partial(_prepare, producers)


def _acquire_in_time(
    pool: Any, deadline: Deadline, longest_s: float | None, block: bool = False, timeout: float | None = None
) -> Any:
    call = deadline.call.get()
    left_s = math.inf if call is None else max(call.latest - time.monotonic(), 0.0)
    wait_s = min(each for each in (left_s, longest_s, timeout) if each is not None)
    try:
        return type(pool).acquire(pool, block, None if wait_s == math.inf else wait_s)
    except LimitExceeded as error:
        if not block:
            raise
        raise no_free_connection(wait_s, pool.limit) from error


def no_free_connection(wait_s: float, limit: int) -> BrokerUnavailable:
    """Return the error of a call that has waited for a connection.

    Args:
        wait_s: Seconds that it has waited.
        limit: Number of connections, all of which other calls use.
    """
    return BrokerUnavailable(
        f"no connection to the broker was free within {wait_s:.1f} s, because other calls use all "
        f"{limit} of them: raise broker_pool_limit, or the limits of the wait, which are "
        "dq_publish_timeout and broker_pool_acquire_timeout"
    )


def _prepare(pool: Any, producer: Any) -> Any:
    if not callable(producer):
        # When no connection is free, kombu releases the producer, and with it the connection of its last use,
        # which another call may have by now.
        producer.__connection__ = None
    return type(pool).prepare(pool, producer)
