"""A worker that lives longer than the addresses of the masters that it has seen."""

from __future__ import annotations

from celery_dq.keys import PartitionKeys
from celery_dq.transport.redis.consumer_identity import ConsumerIdentity
from celery_dq.transport.redis.consuming.consumer_threads import ConsumerThreads
from celery_dq.transport.redis.store.partition import Partition, Queue
from celery_dq.transport.redis.store.slot_map import NodeAddress, SlotMap

#: More restarts of a server than a process sees in a week, each with another address.
RESTARTS = 200


def test_former_addresses_of_a_master_leave_nothing_behind() -> None:
    slots = SlotMap([("10.0.0.1", 6379)])
    process = ConsumerIdentity(5.0, slots=slots)
    threads = process.threads = ConsumerThreads(process)
    queue = Queue("mail", Partition(PartitionKeys("online", "mail"), process.scripts))
    for number in range(RESTARTS):
        slots.moved(queue.partition.keys.slot, NodeAddress(f"10.0.0.{number}", 6379))
        assert threads.of(queue) is threads.of(queue)
    # The main thread, the present master's, and at most one more.
    assert len(threads.all) <= 3
