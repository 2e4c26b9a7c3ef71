"""The planned postings, and the balance that they give. Pure."""

from __future__ import annotations

import random
from typing import NamedTuple

PAY, INTEREST = "pay", "interest"


class Entry(NamedTuple):
    """One posting: ``amount`` in cents for a payment (in or out), in per mille for interest."""

    number: int
    kind: str
    amount: int


def entries(seed: int, count: int) -> list[Entry]:
    """Return `count` postings, numbered from 1; the same for the same seed."""
    chance = random.Random(seed)
    made = [Entry(1, PAY, 1_000_000)]
    for number in range(2, count + 1):
        if chance.random() < 0.3:
            made.append(Entry(number, INTEREST, chance.randint(-20, 20)))
        else:
            made.append(Entry(number, PAY, chance.randint(-90_000, 100_000)))
    return made


def apply(balance: int, kind: str, amount: int) -> int:
    """Return the balance after one posting. Interest and payments do not commute, so the order matters."""
    return balance + (balance * amount // 1000 if kind == INTEREST else amount)
