"""The share of the scripts and of the claim rate that the counters of a queue take.

The scripts with their counters and the same scripts without them take turns, on one server. First the scripts
are called alone, then a consumer of kombu claims and acknowledges a backlog with them.
"""

from __future__ import annotations

import copy
import dataclasses
from statistics import quantiles
from unittest.mock import patch

import redis

from benchmarks.measure import Found, Report, Series, benchmark, dump, interleave, short, spending
from benchmarks.postbox import Sink, connect, publish_many
from benchmarks.script_calls import Lives, ServerClock, partitions_of, push_and_claim_batches
from celery_dq.errors import ScriptError
from celery_dq.scripts import ScriptSet
from celery_dq.testing.servers import RedisServer
from celery_dq.transport.redis import consumer_identity
from celery_dq.transport.redis.store.script_calls import load_scripts

#: Script -> the text of its counters -> the text without them.
COUNTERS: dict[str, dict[str, str]] = {
    "claim": {
        # The short path of plain messages.
        "'sets', 'waits_alone', 'settled')\nlocal epoch": "'sets')\nlocal epoch",
        "  local waits = n > 0 and unpack_waits(waits_alone)\n": "",
        "    add_wait(waits, score, has_priorities and string.byte(records[i], 2) or 0)\n": "",
        "  if n > 0 then state[9], state[10] = 'waits_alone', struct.pack(WAITS, unpack(waits)) end\n": "",
        # The path of all others.
        "  if reason == '' and is_alone then\n": "  if false then\n",
        "  elseif reason == '' then\n    delivery.in_line": "  elseif false then\n    delivery.in_line",
        "  dq.count_waits()\n": "",
    },
    "ack": {
        "'paused_until', 'settled')\nlocal epoch": "'paused_until')\nlocal epoch",
        "  if settled > 0 then\n    call('HSET', KEYS[1], 'held', held, 'settled'": (
            "  if false then\n    call('HSET', KEYS[1], 'held', held, 'settled'"
        ),
    },
}
#: Turns before the first that counts: the first calls meet empty keys.
WARM_UP = 3
#: The calls in which the counters take part.
CALLS = ("claim, single", "claim, quota", "claim, batch", "finish, single", "settle and finish, single")
#: What the consumer measures -> (prefetch, tenants of the backlog): claims of one message, and of many.
CONSUMERS = {"consumer, single": (1, 100_000), "consumer, batch": (100, 100)}
MESSAGES = 2_000


@benchmark(
    "call | µs with counters | µs without | with / without",
    f"""
    µs: as in script_calls, pipelined, 32 calls at a time with and without in turns
    consumer: µs of CPU of a kombu consumer and of Redis together, per message that is claimed and acked
    of a backlog of {MESSAGES:,}; single: prefetch 1, a tenant each; batch: prefetch 100, 100 tenants
    in Redis: the part of it that Redis spends; the counters take nothing of the rest
    medians (quartiles) of {{repeats}} turns, of {{rounds}} with a consumer; the ratio is of the medians
    """,
)
def counter_cost(report: Report, quick: bool) -> None:
    """Microseconds per claim and ack, in Redis and in all, with the counters of the queue and without."""
    repeats, rounds = (60, 5) if quick else (400, 60)
    report.fill_in(repeats=repeats, rounds=rounds)
    contenders = {"with": load_scripts(), "without": without_counters(load_scripts())}
    found = _times(contenders, repeats)
    with RedisServer() as server:
        spent = interleave(
            list(contenders), rounds, lambda which: _consume(server.port, contenders[which]), 600
        )
    for which in found:
        found[which].update(spent[which])
    for call in (*CALLS, *spent["with"]):
        cells = [quantiles(found[which][call].values, n=4) for which in contenders]
        report.row(
            call,
            *(f"{short(each[1])} ({short(each[0])}-{short(each[2])})" for each in cells),
            f"{cells[0][1] / cells[1][1]:.3f}x",
        )
    report.data = dump(found)


def _consume(port: int, scripts: ScriptSet) -> dict[str, float]:
    """Return µs of CPU per message that a consumer claims and acks: of both processes, and of Redis."""
    found = {}
    patched = patch.object(consumer_identity, "load_scripts", lambda on_cluster=False: scripts)
    for name, (prefetch, tenants) in CONSUMERS.items():
        with redis.Redis(port=port) as client:
            client.flushall()
        with patched, connect("dq", port) as connection:
            publish_many(connection, (f"t{n % tenants}" for n in range(MESSAGES)))
            with Sink(connection, prefetch) as sink:
                sink.drain(100, 10)
                got = len(sink.arrivals)
                with spending(port) as spent:
                    sink.drain(MESSAGES, 60)
                each = spent.per(len(sink.arrivals) - got)
        found[name] = each["own"] + each["cpu"]
        found[f"{name}, in Redis"] = each["cpu"]
    return found


def _times(contenders: dict[str, ScriptSet], repeats: int) -> Found:
    """Return with or without -> call -> µs of each turn."""
    found: Found = {which: {} for which in contenders}
    with RedisServer() as server, redis.Redis(port=server.port, socket_timeout=None) as client:
        clock = ServerClock(client, pipelined=True)
        lives, batches = {}, {}
        for which, scripts in contenders.items():
            for name in scripts.names():
                client.script_load(scripts[name].source)
            lives[which] = [Lives(clock, scripts, kind, f"{which} {kind}") for kind in ("single", "quota")]
            batches[which] = partitions_of(scripts, f"{which} batch", 1)
        for repeat in range(-WARM_UP, repeats):
            for which in contenders if repeat % 2 else reversed(contenders):
                clock.forget()
                for each in lives[which]:
                    each.live(f"m{repeat}")
                push_and_claim_batches(clock, batches[which], f"b{repeat}")
                for call, us in clock.averages().items() if repeat >= 0 else ():
                    found[which].setdefault(call, Series()).values.append(us)
    return found


def without_counters(scripts: ScriptSet) -> ScriptSet:
    """Return a copy of the scripts without the waiting times and the number of settled messages.

    Raises:
        ScriptError: A script has changed, so that the text of its counters is not found.
    """
    scripts = copy.copy(scripts)
    for name, counters in COUNTERS.items():
        source = scripts[name].source
        for text, without in counters.items():
            if source.count(text) != 1:
                raise ScriptError(
                    f"script {name!r} has {source.count(text)} times the text {text!r}, not once"
                )
            source = source.replace(text, without)
        scripts[name] = dataclasses.replace(scripts[name], source=source)
    return scripts
