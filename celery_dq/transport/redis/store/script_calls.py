"""The scripts of the tenant broker, and a call of one of them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import Any, Generic, TypeVar

from celery_dq.scripts.loader import Argument, Redis, Script, ScriptSet

T = TypeVar("T")

#: The names of the scripts, each a file of the folder.
SCRIPTS = (
    "ack",
    "backlogs",
    "cancel",
    "cancel_tenant",
    "claim",
    "dead_letter",
    "departed",
    "drop_exported",
    "edit",
    "declare_partitions",
    "evict",
    "explain_tenant",
    "export_messages",
    "fence",
    "forget_dead",
    "locate",
    "hand_over_wakeup",
    "oldest_waiting",
    "pause",
    "place_held_back",
    "purge",
    "push",
    "quota",
    "release",
    "heartbeat",
    "import_messages",
    "open_tenants",
    "replay",
    "resign",
    "set_partitions",
    "settings_quota",
    "take",
)


@dataclasses.dataclass(eq=False, slots=True)
class ScriptCall(Generic[T]):
    """A script with its arguments, ready to be sent."""

    script: Script
    keys: tuple[str, ...]
    args: tuple[Argument, ...]
    parse: Callable[[Any], T]

    def command(self, full: bool = False) -> tuple[Argument, ...]:
        """Return the words to send; ``full`` after the server answered NOSCRIPT."""
        if full:
            return self.script.command(self.keys, self.args, full=True)
        return ("EVALSHA", self.script.sha1, len(self.keys), *self.keys, *self.args)

    def run(self, client: Redis) -> T:
        """Send the call on ``client``, wait, and return the parsed reply."""
        return self.parse(self.script.run(client, self.keys, self.args))


def commands_with_sources(calls: Sequence[ScriptCall[Any]]) -> list[tuple[Argument, ...]]:
    """Return the words that send these calls, in this order, to a server that lacks their scripts.

    Only the first call of each script carries the source: it brings the script to the server.
    """
    brought: set[str] = set()
    commands = []
    for call in calls:
        commands.append(call.command(full=call.script.sha1 not in brought))
        brought.add(call.script.sha1)
    return commands


@functools.cache  # to put them together takes six times as long as the rest of a new connection
def load_scripts(on_cluster: bool = False) -> ScriptSet:
    """Return the scripts of the tenant broker, read from their files at the first call.

    Args:
        on_cluster: Whether they run on a Redis Cluster.
    """
    return ScriptSet(files("celery_dq.transport.redis") / "lua", *SCRIPTS, on_cluster=on_cluster)
