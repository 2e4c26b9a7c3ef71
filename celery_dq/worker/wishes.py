"""What tasks ask for, and are told, where the worker gives the verdicts."""

from __future__ import annotations

from typing import Any, NamedTuple

from celery_dq.dedup.coordinator import Grant
from celery_dq.dedup.key import Key
from celery_dq.dedup.rule import rule_of
from celery_dq.dedup.signals import verdict_given
from celery_dq.hooks import CLAIM_HEADER
from celery_dq.worker.led_message import LedMessage


class Wish(NamedTuple):
    """What a task asks for: the ``dq_claim`` header, read."""

    key: str
    policy: Any
    waiting: int
    timeout: float | None


class Wishes:
    """What requests ask for: as their message says, else as their task does."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._keys: dict[str, Key] = {}

    def of(self, request: Any) -> Wish | None:
        """Return the wish of a request, its key in the scope of its queue and tenant.

        A led message that its worker has given back wishes for nothing here: it does so elsewhere.
        """
        led: LedMessage | None = getattr(request.message, "dq_led", None)
        if led is not None and led.is_over:
            return None
        said = request.request_dict.get(CLAIM_HEADER)
        if said is None:
            rule = rule_of(request.task)
            if rule is None:
                return None
            key = self._keys.get(request.name)
            if key is None:
                key = self._keys[request.name] = Key(rule.name or request.name, request.task.run, rule.key)
            args, kwargs, _ = request._payload
            said = {
                "key": key(args or (), kwargs or {}),
                "timeout": rule.seconds,
                "policy": "replace" if rule.on_duplicate == "replace" else "decline",
                "waiting": rule.waiting,
            }
        if led is not None:
            led.asks = True
        queue = (request.delivery_info or {}).get("routing_key") or ""
        return Wish(f"{queue}|{said['key']}", said["policy"], said["waiting"], said["timeout"])


def announce(request: Any, wish: Wish, grant: Grant) -> None:
    """Send the signal of a verdict."""
    verdict_given.send(
        sender=request.name,
        verdict=grant.verdict,
        key=wish.key,
        task_id=request.id,
        covering=grant.covering.partition("/")[0],
        replaced=(grant.replaced or "").partition("/")[0],
    )
