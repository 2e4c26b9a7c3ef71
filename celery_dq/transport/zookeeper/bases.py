"""What this transport takes over from kombu, private parts included; typed in ``bases.pyi``.

Known to hold for kombu 5.5 to 5.7, by the test suite.
"""

from __future__ import annotations

from kombu.message import Message as KombuMessage
from kombu.transport.virtual import (
    Channel as VirtualChannel,
    QoS as VirtualQoS,
    Transport as VirtualTransport,
)

__all__ = ["KombuMessage", "VirtualChannel", "VirtualQoS", "VirtualTransport"]
