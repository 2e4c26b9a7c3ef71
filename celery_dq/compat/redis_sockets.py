"""The sockets of redis-py's connections, at which the consumer thread waits."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from celery_dq.compat.guard import check

check("redis_sockets")

#: Returns the socket of a connection; None while it is not connected.
socket_of: Callable[[Any], Any] = attrgetter("_sock")
