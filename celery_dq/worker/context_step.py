"""The base class of the boot steps that concern some brokers or settings only."""

from __future__ import annotations

from typing import Any

from celery import bootsteps

from celery_dq.context import AppContext

__all__ = ["ContextStep"]


class ContextStep(bootsteps.StartStopStep):
    """A boot step that Celery leaves out, with its ``start`` and ``stop``, where it has nothing to do."""

    def __init__(self, consumer: Any, **kwargs: Any) -> None:
        super().__init__(consumer, **kwargs)
        context = AppContext.of(consumer.conninfo)
        self.enabled = context is not None and self.prepare(consumer, context)

    def prepare(self, consumer: Any, context: AppContext) -> bool:
        """Prepare the step; return False for another broker, or without the setting of the step."""
        raise NotImplementedError
