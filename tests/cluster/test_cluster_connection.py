"""A connection to a whole cluster: routing, moved and moving slots, fail-overs, replicas."""

from __future__ import annotations

import threading
import time
from functools import partial
from itertools import count
from typing import Any

import pytest
import redis
from kombu import Producer, Queue

from celery_dq.hash_slots import slot_of
from celery_dq.keys import PartitionKeys
from celery_dq.testing.redis_cluster import ClusterNode, RedisCluster
from celery_dq.testing.waiting import wait_until
from celery_dq.transport.redis.store import move_calls
from celery_dq.transport.redis.store.cluster_client import ClusterClient, cluster_pool, slots_of
from celery_dq.transport.redis.store.move_calls import run_confirmed
from celery_dq.transport.redis.store.partition import Partition
from celery_dq.transport.redis.store.script_calls import PipelinedConnection, load_scripts
from celery_dq.transport.redis.store.server_errors import PushInterrupted
from celery_dq.transport.redis.store.slot_map import NodeUnreachable

#: Keys of all three masters.
KEYS = [f"key-{number}" for number in range(12)]
DECLARED = "return redis.call('INCR', KEYS[1])"


@pytest.fixture(autouse=True)
def clean(client: ClusterClient, redis_cluster: RedisCluster) -> None:
    for key in KEYS:
        client.delete(key)
    assert len({redis_cluster.master_of(slot_of(key)).port for key in KEYS}) == 3


def test_each_command_goes_to_its_node_and_answers_keep_their_order(client: ClusterClient) -> None:
    with client.pipeline(transaction=False) as pipe:
        for number, key in enumerate(KEYS):
            pipe.set(key, number)
            pipe.get(key)
        assert pipe.execute()[1::2] == [b"%d" % number for number in range(len(KEYS))]


def test_a_transaction_of_several_slots_is_atomic_in_each(client: ClusterClient) -> None:
    with client.pipeline(transaction=True) as pipe:
        for key in KEYS:
            pipe.incr(key)
        for key in KEYS:
            pipe.get(key)
        pipe.time()
        *answers, _ = pipe.execute()
    assert answers == [1] * len(KEYS) + [b"1"] * len(KEYS)


def test_an_error_in_a_transaction_has_its_place(client: ClusterClient) -> None:
    with client.pipeline(transaction=True) as pipe:
        pipe.set(KEYS[0], "text")
        pipe.set(KEYS[1], 5)
        pipe.incr(KEYS[0])
        pipe.incr(KEYS[1])
        *_, failed, counted = pipe.execute(raise_on_error=False)
    assert isinstance(failed, redis.ResponseError)
    assert counted == 6


def test_a_moved_slot_is_followed(client: ClusterClient, redis_cluster: RedisCluster) -> None:
    client.set(KEYS[0], "here")
    slot = slot_of(KEYS[0])
    target = redis_cluster.move_slot(slot)
    assert client.get(KEYS[0]) == b"here"
    assert slots_of(client.connection_pool).node_of(slot) == ("127.0.0.1", target.port)


@pytest.fixture
def moving(client: ClusterClient, redis_cluster: RedisCluster) -> tuple[int, ClusterNode, ClusterNode]:
    """The slot of the first key, which moves now and has its key on the target, the source and the target."""
    client.set(KEYS[0], 1)
    slot = slot_of(KEYS[0])
    target = next(each for each in redis_cluster.masters() if each is not redis_cluster.master_of(slot))
    source = redis_cluster.begin_move(slot, target)
    redis_cluster.move_keys(slot, source, target)
    return slot, source, target


def test_a_moving_slot_is_asked_for_by_single_commands(
    client: ClusterClient, redis_cluster: RedisCluster, moving: Any
) -> None:
    assert client.get(KEYS[0]) == b"1"
    redis_cluster.end_move(moving[0], moving[2])
    assert client.get(KEYS[0]) == b"1"


def test_scripts_wait_for_the_end_of_a_move(
    client: ClusterClient, redis_cluster: RedisCluster, moving: Any
) -> None:
    answers: list[int] = []
    caller = threading.Thread(target=lambda: answers.append(client.eval(DECLARED, 1, KEYS[0])))
    caller.start()
    # Any other command is answered while the script waits.
    assert [client.get(key) for key in KEYS[1:]] == [None] * (len(KEYS) - 1)
    time.sleep(0.2)  # the script would have been answered in this time
    assert answers == []
    redis_cluster.end_move(moving[0], moving[2])
    caller.join(30)
    assert answers == [2]


def test_a_caller_that_waits_too_long_learns_that_the_slot_moves(
    client: ClusterClient, redis_cluster: RedisCluster, moving: Any
) -> None:
    pool = cluster_pool(slots_of(client.connection_pool), redis.Connection, socket_timeout=0.3)
    impatient = ClusterClient(connection_pool=pool)
    # A broker that is down for a moment has such an error: callers try again.
    gives_up = partial(
        pytest.raises, redis.exceptions.TryAgainError, match=f"slot {moving[0]} .* moves to another"
    )
    with gives_up():
        impatient.eval(DECLARED, 1, KEYS[0])
    with gives_up(), impatient.pipeline(transaction=True) as pipe:
        pipe.get(KEYS[0])
        pipe.get(KEYS[0])
        pipe.execute()
    redis_cluster.end_move(moving[0], moving[2])
    assert client.get(KEYS[0]) == b"1"


def test_each_node_gets_a_script_that_it_does_not_know(
    client: ClusterClient, redis_cluster: RedisCluster
) -> None:
    script = client.register_script(DECLARED)
    for node in redis_cluster.masters():
        node.ask("SCRIPT", "FLUSH")
    assert [script(keys=[key]) for key in KEYS] == [1] * len(KEYS)


def test_replicas_of_all_written_nodes_are_waited_for(
    client: ClusterClient, redis_cluster: RedisCluster
) -> None:
    wire = PipelinedConnection(client.connection_pool)
    wire.open()
    for key in KEYS:
        wire.ask(("SET", key, "x"))
    assert wire.ask(("WAIT", 1, 5000)) == 1
    master = redis_cluster.master_of(slot_of(KEYS[0]))
    other = next(key for key in KEYS if redis_cluster.master_of(slot_of(key)) is not master)
    stopped = redis_cluster.replica_of(master)
    stopped.pause()
    try:
        for key in KEYS:
            wire.ask(("SET", key, "y"))
        assert wire.ask(("WAIT", 1, 100)) == 0
        wire.ask(("SET", other, "z"))
        assert wire.ask(("WAIT", 1, 5000)) == 1
    finally:
        stopped.resume()
        wire.close()


def test_a_step_of_a_change_is_confirmed_by_replicas_of_its_own_node(
    client: ClusterClient, redis_cluster: RedisCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(move_calls, "CONFIRM_TIMEOUT_MS", 100)
    keys = (PartitionKeys("online", f"confirmed-{number}") for number in count())
    first = Partition(next(keys), load_scripts(on_cluster=True))
    master = redis_cluster.master_of(first.keys.slot)
    elsewhere = next(each for each in keys if redis_cluster.master_of(each.slot) is not master)
    other = Partition(elsewhere, first.scripts)
    step = first.heartbeat("w", lease_ms=1000)
    parse = step.parse

    def lose_connection(reply: Any) -> Any:
        # The connections to the other nodes stay, and a WAIT may go to them.
        master.ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        return parse(reply)

    stopped = redis_cluster.replica_of(master)
    stopped.pause()
    try:
        for each in (first, other):
            each.heartbeat("w", lease_ms=1000).run(client)
        step.parse = lose_connection
        with pytest.raises(NodeUnreachable):
            run_confirmed(step, first, client, 1)
    finally:
        stopped.resume()
    assert run_confirmed(other.heartbeat("w", lease_ms=1000), other, client, 1)


def test_a_killed_node_costs_its_own_answers_only(client: ClusterClient, redis_cluster: RedisCluster) -> None:
    for key in KEYS:
        client.set(key, "kept")
    wait_until(lambda: client.wait(1, 1000) == 1)
    master = redis_cluster.master_of(slot_of(KEYS[0]))
    lost = [key for key in KEYS if redis_cluster.master_of(slot_of(key)) is master]
    careful, repeating = (PipelinedConnection(client.connection_pool, repeats) for repeats in (False, True))
    for wire in (careful, repeating):
        wire.open()
        wire.ask(("GET", KEYS[0]))
    master.pause()
    try:
        for wire in (careful, repeating):
            wire.send_all([("GET", key) for key in KEYS])
        threading.Timer(0.3, master.kill).start()
        answers = [_answer(careful) for _ in KEYS]
        assert [key for key, each in zip(KEYS, answers, strict=True) if each == b"kept"] == [
            key for key in KEYS if key not in lost
        ]
        assert all(isinstance(each, (NodeUnreachable, bytes)) for each in answers)
        # The commands that may run twice are sent again, to the replica when it is the master.
        assert [_answer(repeating) for _ in KEYS] == [b"kept"] * len(KEYS)
    finally:
        for wire in (careful, repeating):
            wire.close()
        redis_cluster.restore()


def test_a_push_that_its_node_never_takes_is_no_node_that_is_away(
    connection: Any, redis_cluster: RedisCluster, queue_name: str
) -> None:
    connection.transport_options["socket_timeout"] = 0.3
    producer = Producer(connection.default_channel)
    producer.publish("small", routing_key=queue_name, declare=[Queue(queue_name)])
    for node in redis_cluster.nodes:
        node.ask("CONFIG", "SET", "client-query-buffer-limit", "1mb")
    try:
        with pytest.raises(PushInterrupted, match="message of 3,000,.* client-query-buffer-limit"):
            producer.publish("x" * 3_000_000, routing_key=queue_name)
    finally:
        for node in redis_cluster.nodes:
            node.ask("CONFIG", "SET", "client-query-buffer-limit", "1gb")
    producer.publish("small", routing_key=queue_name)


def _answer(wire: PipelinedConnection) -> Any:
    try:
        return wire.read()
    except redis.ResponseError as exc:
        return exc


def test_a_connection_to_a_node_that_was_closed_counts_when_it_is_opened_again(
    client: ClusterClient, redis_cluster: RedisCluster
) -> None:
    """Then the consumer thread compares what the broker and the process have, as on one server."""
    wire = PipelinedConnection(client.connection_pool)
    wire.open()
    wire.ask(("GET", KEYS[0]))
    before, own = wire.connects, wire.ask(("CLIENT", "ID"))  # of the same node
    assert wire.connects == before
    master = redis_cluster.master_of(slot_of(KEYS[0]))
    master.ask("CLIENT", "KILL", "ID", own)
    wait_until(lambda: not master.ask("CLIENT", "LIST", "ID", own))
    wire.has_answer()  # forgets a connection that the node has closed
    wire.ask(("GET", KEYS[0]))
    assert wire.connects == before + 1
    wire.close()


def test_a_scan_finds_the_keys_of_all_masters(client: ClusterClient) -> None:
    names = {f"scanned-{number}".encode() for number in range(30)}
    for name in names:
        client.set(name, 1)
    try:
        assert {*client.scan_iter(match="scanned-*")} == names
    finally:
        for name in names:
            client.delete(name)
