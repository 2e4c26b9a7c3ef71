"""The preparation of a call's result before the call is sent.

Celery calls ``on_task_call`` of the result backend before each publish. The backend on Redis subscribes to
the result there, and retries for 20 s while its server is away. The rpc backend declares its reply queue,
and retries for ever. Neither knows the deadline of the call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery._state import task_join_will_block  # type: ignore[attr-defined]  # not in its stubs
from kombu.common import maybe_declare

from celery_dq.app.timeouts import Deadline
from celery_dq.producer.buffering_producer import BufferingProducer

__all__ = ["NO_SERVER_ASKED", "prepare_for_results"]

#: Modules whose backends ask no server before a call. The Redis backend asks none once it was prepared.
NO_SERVER_ASKED = ("celery.backends.base", "celery.backends.redis")
_RPC = "celery.backends.rpc"


def prepare_for_results(app: Any, deadline: Deadline) -> None:
    """Make the app's result backend keep the deadline of calls. Idempotent.

    Args:
        app: A Celery app.
        deadline: The deadline of the app's calls.
    """
    backend = app.backend
    if "on_task_call" not in backend.__dict__:
        backend.on_task_call = _OnTaskCall(app, backend, deadline)


class _OnTaskCall:
    """Replaces a backend's ``on_task_call``.

    Subscribing to a result can wait until a caller asks for the result: Celery then subscribes in any case,
    and reads a result that has arrived before.
    """

    def __init__(self, app: Any, backend: Any, deadline: Deadline) -> None:
        self._app = app
        self._backend = backend
        self._deadline = deadline
        self._original: Callable[..., Any] = backend.on_task_call
        self._module = type(backend).on_task_call.__module__

    def __call__(self, producer: Any, task_id: str) -> Any:
        """See Celery's ``Backend.on_task_call``."""
        if isinstance(producer, BufferingProducer) or self._module in NO_SERVER_ASKED:
            return
        if self._module == _RPC:
            self._declare_reply_queue(producer)
        else:
            self._original(producer, task_id)

    def _declare_reply_queue(self, producer: Any) -> None:
        """Do what the rpc backend does, with the retries of a publish."""
        if task_join_will_block():
            return
        conf = self._app.conf
        policy = dict(conf.task_publish_retry_policy or {}, errback=self._deadline)
        if not conf.task_publish_retry:
            policy["max_retries"] = 0
        maybe_declare(self._backend.binding(producer.channel), retry=True, **policy)
