"""The parts of kombu's virtual transport that both transports reuse, private parts included.

Kombu's virtual transport is not designed for subclasses outside of kombu: many of the reused names are
private. All of them are listed here and typed in ``bases.pyi``. So a reader, the type checker and a check
against a new kombu release need one page only. The test suite covers kombu 5.5 to 5.7.
"""

from __future__ import annotations

from kombu.message import Message as KombuMessage
from kombu.transport.virtual import (
    Channel as VirtualChannel,
    QoS as VirtualQoS,
    Transport as VirtualTransport,
)

__all__ = ["KombuMessage", "VirtualChannel", "VirtualQoS", "VirtualTransport"]
