"""Ends of a process at a chosen point, as by the kernel."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import Any

from celery_dq.app.senders import AppSender
from celery_dq.producer.sender import Refusal


def kill_when_asked() -> None:
    """Let the process end before or after its N-th batch, as SHOP_KILL says: ``after 1``."""
    asked = os.environ.get("SHOP_KILL")
    if not asked:
        return
    moment, count = asked.split()
    send = AppSender.send
    left = int(count)

    def send_and_die(sender: AppSender, *args: Any) -> Sequence[Refusal]:
        nonlocal left
        left -= 1
        if moment == "before" and not left:
            os.kill(os.getpid(), signal.SIGKILL)
        refusals = send(sender, *args)
        if moment == "after" and not left:
            os.kill(os.getpid(), signal.SIGKILL)
        return refusals

    sender_class: Any = AppSender
    sender_class.send = send_and_die
