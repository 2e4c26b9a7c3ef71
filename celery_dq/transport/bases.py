"""What both transports take over from kombu's virtual one, private parts included.

It is not made to be built upon: much of what we reuse is underscored. It is listed here, and typed in
``bases.pyi``, so that a reader and the type checker see all of it at once, and so that a new kombu release is
checked against one page. Known to hold for kombu 5.5 to 5.7, by the test suite.
"""

from __future__ import annotations

from kombu.message import Message as KombuMessage
from kombu.transport.virtual import (
    Channel as VirtualChannel,
    QoS as VirtualQoS,
    Transport as VirtualTransport,
)

__all__ = ["KombuMessage", "VirtualChannel", "VirtualQoS", "VirtualTransport"]
