"""The boot step that makes a worker of another broker a candidate for its singleton queues."""

from __future__ import annotations

from typing import Any

from celery_dq.clock import SystemClock
from celery_dq.context import AppContext
from celery_dq.options.sections import Options
from celery_dq.options.singleton import SingletonOptions
from celery_dq.other_brokers.singleton_sequencer import SingletonSequencer
from celery_dq.singleton.leaderships import WorkerLeaderships
from celery_dq.worker.singleton import SingletonStep


class SequencedSingletonStep(SingletonStep):
    """Consumes each singleton queue in the terms of the worker, one message after the other.

    Does nothing on a tenant broker, whose scripts refuse a stale token.
    """

    fenced = False

    def __init__(self, consumer: Any, **kwargs: Any) -> None:
        self._sequencer: SingletonSequencer | None = None
        super().__init__(consumer, **kwargs)

    def _sections(self, consumer: Any, options: Options) -> dict[str, SingletonOptions]:
        if not options.election and consumer.conninfo.transport.driver_type == "amqp":
            # RabbitMQ implements its argument itself: one consumer at a time, without elections and tokens.
            return {section.name: section for section in options.singletons}
        return super()._sections(consumer, options)

    def _prepare(
        self, consumer: Any, context: AppContext, sections: dict[str, SingletonOptions]
    ) -> WorkerLeaderships:
        leaderships = super()._prepare(consumer, context, sections)
        # Celery's own consumer must not consume them, because it ignores leaderships.
        for name in sections:
            consumer.app.amqp.queues.deselect(name)
        lease_s = context.options.lease_us / 1e6
        self._sequencer = SingletonSequencer(consumer, leaderships, sections, lease_s, SystemClock())
        return leaderships

    def start(self, consumer: Any) -> None:
        """Consume in the terms of the worker, and become a candidate."""
        if self._sequencer is not None:
            self._sequencer.start()
        super().start(consumer)

    def stop(self, consumer: Any) -> None:
        """Cease to consume, and begin to hand over if the worker stops."""
        if self._sequencer is not None:
            self._sequencer.stop()
        super().stop(consumer)

    def shutdown(self, consumer: Any) -> None:
        """Hand over: the pool is drained or killed."""
        if self._sequencer is not None:
            self._sequencer.close()
        super().shutdown(consumer)
