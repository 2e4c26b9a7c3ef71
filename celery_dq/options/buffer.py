"""The settings of the buffered producer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from celery_dq.duration import SECOND_US
from celery_dq.errors import ConfigurationError
from celery_dq.options.schema import Kind, Setting

__all__ = ["BUFFER_SETTINGS", "BufferOptions", "buffer_options"]

_GIB = 1024**3

BUFFER_SETTINGS = (
    Setting("dq_buffer", Kind.FLAG, False, "Whether calls without their own option `buffered` are buffered."),
    Setting(
        "dq_buffer_folder",
        Kind.TEXT,
        None,
        "Folder of buffered messages until the broker has them; '' keeps them in memory only.",
        optional=True,
    ),
    Setting(
        "dq_buffer_in_workers",
        Kind.FLAG,
        False,
        "Whether calls from tasks and from beat are buffered too.",
    ),
    Setting(
        "dq_buffer_linger",
        Kind.DURATION,
        5_000,
        "Time that a message waits for further messages of its batch.",
        low=0,
        high=60 * SECOND_US,
    ),
    Setting("dq_buffer_batch_size", Kind.WHOLE, 500, "Messages in a batch.", low=1, high=1_000),
    Setting(
        "dq_buffer_max_messages", Kind.WHOLE, 100_000, "Messages in memory; more go to disk only.", low=1
    ),
    Setting("dq_buffer_max_bytes", Kind.WHOLE, _GIB // 16, "Bytes of messages in memory.", low=64 * 1024),
    Setting(
        "dq_buffer_max_spill_bytes",
        Kind.WHOLE,
        _GIB,
        "Limit of dq_buffer_folder in bytes, all processes together.",
        low=4 * 1024 * 1024,
    ),
    Setting(
        "dq_buffer_max_block",
        Kind.DURATION,
        SECOND_US,
        "Time that a call waits for room before it raises BufferFull; 0 raises at once.",
        low=0,
        high=3_600 * SECOND_US,
    ),
    Setting(
        "dq_buffer_sync_every",
        Kind.WHOLE,
        0,
        "A call waits for the disk rather than being this many messages ahead of it; 1: each call; 0 is off.",
        low=0,
    ),
    Setting(
        "dq_buffer_sync_interval",
        Kind.DURATION,
        0,
        "Time after which buffered messages are synced to disk; 0 is off.",
        low=1_000,
        high=3_600 * SECOND_US,
        zero_is_off=True,
    ),
    Setting(
        "dq_buffer_close_timeout",
        Kind.DURATION,
        2 * SECOND_US,
        "Time that a process may take at its end to send the remaining messages.",
        low=0,
        high=3_600 * SECOND_US,
    ),
)


@dataclass(frozen=True)
class BufferOptions:
    """Options of the buffered producer. Durations are whole microseconds (``_us``).

    Attributes:
        enabled: ``dq_buffer``, for calls without their own option; default False.
        folder: ``dq_buffer_folder``, of the spill log. "" holds messages in memory only. With None (default)
            no call can be buffered.
        in_workers: ``dq_buffer_in_workers``, for calls from tasks and beat; default False.
        linger_us: ``dq_buffer_linger``; default 5 ms.
        batch_size: ``dq_buffer_batch_size``; default 500.
        max_messages: ``dq_buffer_max_messages``, in memory; default 100,000.
        max_bytes: ``dq_buffer_max_bytes``, in memory; default 64 MiB.
        max_spill_bytes: ``dq_buffer_max_spill_bytes``, on disk; default 1 GiB.
        max_block_us: ``dq_buffer_max_block``; default 1 s.
        sync_every: ``dq_buffer_sync_every``; default 0.
        sync_interval_us: ``dq_buffer_sync_interval``; default 0.
        close_timeout_us: ``dq_buffer_close_timeout``; default 2 s.
    """

    enabled: bool = False
    folder: str | None = None
    in_workers: bool = False
    linger_us: int = 5_000
    batch_size: int = 500
    max_messages: int = 100_000
    max_bytes: int = _GIB // 16
    max_spill_bytes: int = _GIB
    max_block_us: int = SECOND_US
    sync_every: int = 0
    sync_interval_us: int = 0
    close_timeout_us: int = 2 * SECOND_US


def buffer_options(values: Mapping[str, Any]) -> BufferOptions:
    """Make the options from checked `values`.

    Raises:
        ConfigurationError: Values contradict each other.
    """
    options = BufferOptions(
        enabled=values["dq_buffer"],
        folder=values["dq_buffer_folder"],
        in_workers=values["dq_buffer_in_workers"],
        linger_us=values["dq_buffer_linger"],
        batch_size=values["dq_buffer_batch_size"],
        max_messages=values["dq_buffer_max_messages"],
        max_bytes=values["dq_buffer_max_bytes"],
        max_spill_bytes=values["dq_buffer_max_spill_bytes"],
        max_block_us=values["dq_buffer_max_block"],
        sync_every=values["dq_buffer_sync_every"],
        sync_interval_us=values["dq_buffer_sync_interval"],
        close_timeout_us=values["dq_buffer_close_timeout"],
    )
    if options.enabled and options.folder is None:
        raise ConfigurationError(
            "dq_buffer = True needs dq_buffer_folder: name a folder that outlives the process, so that no "
            "message is lost when the process is killed, or '' to accept that loss and hold messages in "
            "memory only"
        )
    if not options.folder:
        for name in ("dq_buffer_sync_every", "dq_buffer_sync_interval"):
            if values[name]:
                raise ConfigurationError(
                    f"{name} = {values[name]!r} has no effect without dq_buffer_folder: set the folder, or "
                    f"leave it out"
                )
    return options
