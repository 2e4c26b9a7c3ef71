"""Message ids, task ids and delivery tags; ``include/message_ids.lua`` makes message ids of task ids."""

from __future__ import annotations

import re
from typing import NamedTuple

#: A delivery tag; the key of a partition may end with a fencing token.
_TAG = re.compile(
    r"(?P<prefix>[^{}]*\{[^{}]*\}:)(?:@[0-9]+)?/(?P<claim>[0-9]+)/(?P<message_id>.*)", re.DOTALL
)


class Delivery(NamedTuple):
    """One delivery of a message, as its delivery tag names it.

    Attributes:
        prefix: Prefix of the keys of its partition.
        claim: Claim number.
        message_id: Message id.
    """

    prefix: str
    claim: str
    message_id: str


def delivery_of(tag: str) -> Delivery | None:
    """Return the delivery with this tag; None if it is the tag of another broker."""
    found = _TAG.fullmatch(tag)
    return None if found is None else Delivery(**found.groupdict())


def task_id_of(message_id: str) -> str:
    """Return the task id of a message id: without a number behind ``~``, and with each ``~~`` as ``~``."""
    if "~" not in message_id:
        return message_id
    numbered = re.fullmatch(r"(.*?)(~+)\d+", message_id, re.DOTALL)
    if numbered and len(numbered[2]) % 2:
        message_id = numbered[1] + numbered[2][1:]
    return message_id.replace("~~", "~")
