"""The hash slots of a Redis Cluster, and the numbers that spread the partitions of a queue over them."""

from __future__ import annotations

import binascii
import math
from hashlib import blake2b

#: Number of hash slots of a Redis Cluster.
SLOTS = 16384
#: Slots from the best one for a partition that are as good.
_NEAR_SLOTS = 64
#: Numbers to try for such a slot; of 130 slots in 16384, one is missed by all of them once in 60 partitions.
_MOST_PLACES = 512


def slot_of(key: str | bytes) -> int:
    """Return the hash slot of a key; of a key with a hash tag, that of the tag."""
    raw = key.encode() if isinstance(key, str) else key
    start = raw.find(b"{")
    end = raw.find(b"}", start + 1)
    tag = raw[start + 1 : end] if start >= 0 and end > start + 1 else raw
    return binascii.crc_hqx(tag, 0) % SLOTS


def place_of(environment: str, queue: str, partition: int) -> int:
    """Return the number in the hash tag that brings a partition near its best slot.

    Multiples of the golden ratio are spread evenly over a circle, however many there are. So a partition
    keeps its slot when a queue gets more of them.
    """
    start = int.from_bytes(blake2b(queue.encode(), digest_size=8).digest(), "big") / 2**64
    best = int((start + partition * (math.sqrt(5) - 1) / 2) % 1 * SLOTS)

    def distance(place: int) -> int:
        found = (slot_of(f"{environment}/{queue}/{partition}.{place}") - best) % SLOTS
        return min(found, SLOTS - found)

    places = range(_MOST_PLACES)
    return next((each for each in places if distance(each) <= _NEAR_SLOTS), min(places, key=distance))
