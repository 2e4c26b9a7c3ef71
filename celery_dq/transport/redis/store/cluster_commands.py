"""The slot that a command belongs to, and the answer to a command that several nodes get."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from celery_dq.hash_slots import slot_of

#: Commands without a key. Any node can answer them.
WITHOUT_KEY = frozenset(
    (
        "ACL",
        "CLIENT",
        "CLUSTER",
        "COMMAND",
        "CONFIG",
        "DBSIZE",
        "ECHO",
        "HELLO",
        "INFO",
        "PING",
        "ROLE",
        "TIME",
    )
)
#: The slot whose master carries the broadcasts. Publishers and subscribers meet there, so that a broadcast
#: does not depend on the links between the nodes.
BROADCAST_SLOT = slot_of("_kombu.binding.celery.pidbox")
#: Scripts, which touch more keys than the one they name.
SCRIPTED = frozenset(("EVAL", "EVALSHA"))


def name_of(command: Sequence[Any]) -> str:
    """Return the name of a command in upper case; redis-py joins it with its subcommand in one word."""
    return str(command[0]).partition(" ")[0].upper()


def slot_of_command(command: Sequence[Any]) -> int | None:
    """Return the slot of a command; None when any node can answer it."""
    name = name_of(command)
    if name in WITHOUT_KEY:
        return None
    if name in ("PUBLISH", "PUBSUB"):
        return BROADCAST_SLOT
    if name in SCRIPTED:
        return slot_of(_raw(command[3])) if int(command[2]) else None
    return slot_of(_raw(command[1])) if len(command) > 1 else None


def _raw(key: Any) -> bytes:
    return key if isinstance(key, bytes) else str(key).encode()


def joined_answer(name: str, answers: Sequence[Any]) -> Any:
    """Return one answer for a command that several nodes have answered.

    ``WAIT`` confirms as many replicas as each master has at least. A script is known when each node knows it.
    """
    failed = next((each for each in answers if isinstance(each, Exception)), None)
    if failed is not None:
        return failed
    if name == "WAIT":
        return min(answers)
    if isinstance(answers[0], list):
        return [min(each) for each in zip(*answers, strict=True)]
    return answers[0]
