"""Message ids and task ids; ``include/message_ids.lua`` makes message ids of task ids."""

from __future__ import annotations

import re


def task_id_of(message_id: str) -> str:
    """Return the task id of a message id: without a number behind ``~``, and with each ``~~`` as ``~``."""
    if "~" not in message_id:
        return message_id
    numbered = re.fullmatch(r"(.*?)(~+)\d+", message_id, re.DOTALL)
    if numbered and len(numbered[2]) % 2:
        message_id = numbered[1] + numbered[2][1:]
    return message_id.replace("~~", "~")
