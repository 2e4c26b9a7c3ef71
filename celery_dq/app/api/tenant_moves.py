"""Move tenants to their new homes, after the map of a queue has changed.

A tenant moves in steps. Each is one script of one partition, and may be repeated:

1. All partitions get the new map. From then on, the former home accepts no message of the tenant, and the
   new home accepts them, but does not serve them.
2. The former home goes on with the tenant's backlog from its beginning. The mover takes messages from its
   end: they go to the *outbox*, then to the new home, then they are deleted.
3. When nothing of the tenant waits or runs in the former home, the new one serves it.

A spread tenant may keep a share in a partition that it moves out of. There it goes on, with the messages of
that share. A partition that gets a new share serves it when the other ones have no dedup key of it any more,
and no more running tasks than their own shares allow.

The mover holds no state, so any process may go on after it. An outbox has a number. A partition remembers the
last number from each other partition, and stores no outbox twice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, TypeAlias, TypeVar

from celery_dq.app.api.audit import OnProgress, ignore_progress
from celery_dq.app.api.broker import MapChanged, OpenQueue, stored_map
from celery_dq.errors import CorruptRecord, TooFewReplicas
from celery_dq.inspector.dedup_locks import tenant_and_key
from celery_dq.inspector.redis_values import Client, chunks, scan_all, text
from celery_dq.keys import PartitionKeys
from celery_dq.options.sections import Options
from celery_dq.shown import shown_logger
from celery_dq.transport.message_record import placing_of
from celery_dq.transport.redis.store.message_ids import task_id_of
from celery_dq.transport.redis.store.move_calls import (
    MOVE_CHUNK,
    Outbox,
    departed,
    drop_exported,
    export_messages,
    import_messages,
    open_tenants,
    run_confirmed,
)
from celery_dq.transport.redis.store.partition import Partition
from celery_dq.transport.redis.store.rounds import Atomic, Rounds, run_one
from celery_dq.transport.redis.store.script_calls import ScriptCall

logger = shown_logger(__name__)

_T = TypeVar("_T")

#: The tenant of records that cannot be read. No message has it, so none waits until they have moved.
_UNREADABLE = "\0"
#: Tenant -> number of another partition -> ids of messages that belong there.
_ByPlace: TypeAlias = "defaultdict[str, defaultdict[int, list[str]]]"


class TenantMoves:
    """The moves of one change of the map.

    Args:
        client: A redis-py client.
        partitions: All partitions that the queue has before or after the change, with its map.
        options: The app's settings.
        on_progress: Called with the number of messages that were moved.

    Attributes:
        moved: Number of messages that were moved, dead letters included.
    """

    def __init__(
        self,
        client: Client,
        partitions: Sequence[Partition],
        options: Options,
        on_progress: OnProgress = ignore_progress,
    ) -> None:
        self._client = client
        self._partitions = partitions
        self._homes = partitions[0].homes
        self._head_start_us = options.queue(partitions[0].keys.queue).head_start_us
        self._replicas = options.confirm_replicas
        #: Tenant and number of a partition in which it keeps a share, once the messages that waited there
        #: were divided among all of its shares.
        self._divided_among_shares: set[tuple[str, int]] = set()
        self._on_progress = on_progress
        self.moved = 0

    def step(self) -> int:
        """Move the messages that can be moved, and serve the tenants that have arrived.

        Returns:
            The number of tenants that have not arrived yet.

        Raises:
            MapChanged: Another process has ended the change.
        """
        first = self._partitions[0]
        if stored_map(first, self._client) != self._homes:
            raise MapChanged.of(first.keys.queue)
        left: set[str] = set()
        for source in self._partitions[: self._homes.before]:
            left |= self._empty(source)
        left |= self._open_arrived()
        return len(left)

    def end(self) -> bool:
        """Serve all tenants in their homes; return False when former homes still have something of them.

        Must follow a :meth:`step` after which no tenant is left.

        Raises:
            MapChanged: Another process has ended the change.
        """
        # A step reads places one after another, and sees no tenant that changes its place meanwhile.
        if any(map(self._has_more, self._partitions[: self._homes.before])):
            return False
        for gone in self._partitions[self._homes.count :]:
            if self._client.hlen(gone.keys.messages) or self._client.hlen(gone.keys.dead):
                return False
            # An outbox that is deleted must not come back after the change.
            self._run_confirmed(gone, export_messages(gone, "", 0))
        for partition in self._partitions[: self._homes.count]:
            call = open_tenants(partition, self._homes, (), everyone=True)
            while (expected := self._run_confirmed(partition, call)) > 0:
                pass
            if expected < 0:
                raise MapChanged.of(partition.keys.queue)
        return True

    def deliver_outboxes(self) -> None:
        """Store the messages in their homes that were taken out of the former ones."""
        for source in self._partitions[: self._homes.before]:
            self._deliver_outbox(source)

    # -- out of the former home

    def _deliver_outbox(self, source: Partition) -> None:
        call = export_messages(source, "", 0)
        found = call.run(self._client)
        if found is not None and found.number != "0":
            self._deliver(source, self._run_confirmed(source, call))

    def _empty(self, source: Partition) -> set[str]:
        """Move what can be moved out of a partition; return the tenants of which something may be left."""
        self._deliver_outbox(source)
        letters = self._letters(source)
        delayed, tenants = self._delayed(source), self._with_work(source)
        for tenant in tenants.union(delayed, letters):
            for found in (delayed, letters):
                for to, ids in found.get(tenant, {}).items():
                    self._move(source, tenant, to, ids)
            if (tenant, source.keys.partition) not in self._divided_among_shares:
                self._move_waiting(source, tenant)
            if self._keeps_share(source, tenant):
                self._divided_among_shares.add((tenant, source.keys.partition))
        staying = [each for each in tenants if self._keeps_share(source, each)]
        return tenants.difference(staying).union(delayed, self._locked(source), self._busy(source, staying))

    def _has_more(self, source: Partition) -> bool:
        """Whether anything has to leave a partition. What waits or runs is read at one moment."""
        *places, outbox = run_one(self._client, _all_with_work(source))
        tenants = map(text, chain.from_iterable(places))
        if outbox or not all(self._keeps_share(source, each) for each in tenants):
            return True
        # Behind the above, because a message may have become delayed or a dead letter since the last step.
        return bool(self._delayed(source) or self._letters(source))

    def _move_waiting(self, source: Partition, tenant: str) -> None:
        skip = 0
        while ids := run_one(self._client, _last_waiting(source, tenant, skip)):
            places: dict[int, list[str]] = defaultdict(list)
            for each in ids:
                places[self._homes.place(tenant, task_id_of(each))].append(each)
            skip += len(places.pop(source.keys.partition, ()))
            for to, some in places.items():
                skip += self._move(source, tenant, to, some)

    def _move(self, source: Partition, tenant: str, to: int, ids: Sequence[str]) -> int:
        """Move messages of a tenant to another partition; return how many waiting ones have to stay."""
        kept = 0
        for start in range(0, len(ids), MOVE_CHUNK):
            call = export_messages(source, tenant, to, ids[start : start + MOVE_CHUNK])
            outbox = self._run_confirmed(source, call)
            self._deliver(source, outbox)
            kept += 0 if outbox is None else outbox.kept
        return kept

    def _deliver(self, source: Partition, outbox: Outbox | None) -> None:
        """Store an outbox in the partition to which it goes, and delete it.

        A failover must not bring messages back that were moved, nor lose them with the new home. So replicas
        already have the outbox, and they have what the new home stores before the outbox is deleted.

        Raises:
            MapChanged: One of the two partitions has another map.
        """
        if outbox is None:
            raise MapChanged.of(source.keys.queue)
        if outbox.number == "0":
            return
        to = self._partitions[outbox.to]
        waits = outbox.to not in self._homes.old_partitions(outbox.tenant)
        store = import_messages(to, source, outbox, self._homes, self._head_start_us, waits=waits)
        if not self._run_confirmed(to, store):
            raise MapChanged.of(source.keys.queue)
        self.moved += drop_exported(source, outbox).run(self._client)
        self._on_progress(self.moved)

    def _run_confirmed(self, partition: Partition, call: ScriptCall[_T]) -> _T:
        return run_confirmed(call, partition, self._client, self._replicas)

    # -- into the new home

    def _open_arrived(self) -> set[str]:
        """Serve the tenants that no other partition has to wait for; return those that still wait."""
        arriving = [
            (text(tenant), partition)
            for partition in self._partitions[: self._homes.count]
            for tenant in run_one(self._client, scan_all("zset", partition.keys.arriving))
        ]
        expected: dict[int, set[str]] = defaultdict(set)
        for tenant, _ in arriving:
            for number in self._homes.old_partitions(tenant):
                expected[number].add(tenant)
        answers = {
            (tenant, number): answer
            for number, tenants in expected.items()
            for tenant, answer in self._ask(self._partitions[number], sorted(tenants)).items()
        }
        left: set[str] = set()
        for tenant, home in arriving:
            number = home.keys.partition
            sources = [answers[tenant, each] for each in self._homes.old_partitions(tenant) if each != number]
            if all(arrival and number not in owed for arrival, owed in sources):
                latest = max((arrival for arrival, _ in sources), key=float, default="0")
                open_tenants(home, self._homes, [(tenant, latest)]).run(self._client)
            else:
                left.add(tenant)
        return left

    def _ask(self, source: Partition, tenants: Sequence[str]) -> dict[str, tuple[str, set[int]]]:
        """Ask a partition which tenants have left, and to which partitions it owes messages of them."""
        delayed, locked = self._delayed(source), self._locked(source)
        found = {}
        for tenant, arrival in zip(tenants, self._departed(source, tenants), strict=True):
            has_left = self._keeps_share(source, tenant) or tenant not in delayed
            found[tenant] = (
                arrival if has_left else "",
                {*delayed.get(tenant, ())} | locked.get(tenant, set()),
            )
        return found

    def _busy(self, source: Partition, staying: Sequence[str]) -> set[str]:
        """Return the tenants of which more messages run in a partition than their shares there allow."""
        arrivals = self._departed(source, staying)
        return {tenant for tenant, arrival in zip(staying, arrivals, strict=True) if not arrival}

    def _departed(self, source: Partition, tenants: Sequence[str]) -> list[str]:
        asked = [(tenant, self._keeps_share(source, tenant)) for tenant in tenants]
        parts = [asked[start : start + MOVE_CHUNK] for start in range(0, len(asked), MOVE_CHUNK)]
        return [*chain.from_iterable(departed(source, part).run(self._client) for part in parts)]

    # -- reading

    def _may_belong_elsewhere(self, source: Partition, tenant: str) -> bool:
        """Whether messages of a tenant may belong to another partition than this one."""
        return self._homes.moves(tenant) or source.keys.partition not in self._homes.partitions(tenant)

    def _keeps_share(self, source: Partition, tenant: str) -> bool:
        """Whether a tenant keeps or gets a share in a partition."""
        return source.keys.partition in self._homes.partitions(tenant)

    def _with_work(self, source: Partition) -> set[str]:
        """Return the tenants that move and of which messages wait or run in a partition."""
        found: set[str] = set()
        for key in _places(source.keys):
            found.update(map(text, run_one(self._client, scan_all("zset", key))))
        found.update(map(text, run_one(self._client, scan_all("hash", source.keys.running))))
        return {tenant for tenant in found if self._may_belong_elsewhere(source, tenant)}

    def _delayed(self, source: Partition) -> _ByPlace:
        """Return the delayed messages that belong to other partitions."""
        ids = run_one(self._client, scan_all("zset", source.keys.delayed))
        found: dict[bytes, bytes] = {}
        for part in chunks([*ids]):
            records = self._client.hmget(source.keys.messages, part)
            found.update(
                {each: record for each, record in zip(part, records, strict=True) if record is not None}
            )
        return self._by_place(source, found)

    def _letters(self, source: Partition) -> _ByPlace:
        """Return the dead letters that belong to other partitions."""
        letters = self._by_place(source, run_one(self._client, scan_all("hash", source.keys.dead)))
        for tenant in [each for each in letters if self._keeps_share(source, each)]:
            del letters[tenant]  # a dead letter is found and replayed in each partition of its tenant
        return letters

    def _by_place(self, source: Partition, records: Mapping[bytes, bytes]) -> _ByPlace:
        """Return those of these messages that belong to other partitions."""
        found: _ByPlace = defaultdict(lambda: defaultdict(list))
        for each, packed in records.items():
            try:
                tenant, key = placing_of(packed, task_id_of(text(each)))
            except CorruptRecord:
                if source.keys.partition < self._homes.count:
                    continue
                # In a partition that goes, no command would find it.
                tenant, key = _UNREADABLE, ""
            if self._may_belong_elsewhere(source, tenant):
                place = self._homes.place(tenant, key)
                if place != source.keys.partition:
                    found[tenant][place].append(text(each))
        return found

    def _locked(self, source: Partition) -> dict[str, set[int]]:
        """Return the tenants that keep a share here, and the partitions to which dedup keys here belong."""
        found: dict[str, set[int]] = defaultdict(set)
        for tenant, key in self._spread_keys(source):
            place = self._homes.place(tenant, key)
            if place != source.keys.partition:
                found[tenant].add(place)
        return found

    def _spread_keys(self, source: Partition) -> Iterator[tuple[str, str]]:
        moving = {
            each
            for each in self._homes.spreads
            if self._homes.moves(each) and self._keeps_share(source, each)
        }
        if moving:
            for lock in run_one(self._client, scan_all("hash", source.keys.dedup_locks)):
                tenant, key = tenant_and_key(lock)
                if tenant in moving:
                    yield tenant, key


def _places(keys: PartitionKeys) -> tuple[str, ...]:
    return keys.turn, keys.resource_sets, keys.throttled, keys.at_concurrency, keys.paused


def _all_with_work(source: Partition) -> Rounds[list[Any]]:
    """Return the tenants of which messages wait, those of which some run, and the outbox, at one moment."""
    keys = source.keys

    def read(pipe: Any) -> None:
        for place in _places(keys):
            pipe.zrange(place, 0, -1)
        pipe.hgetall(keys.running)
        pipe.exists(keys.outbox)

    found: list[Any] = yield Atomic(read)
    return found


def _last_waiting(source: Partition, tenant: str, skip: int) -> Rounds[list[str]]:
    """Return ids of the last messages in the order of service, behind those that were skipped."""
    keys = source.keys

    def read(pipe: Any) -> None:
        pipe.hget(keys.single, tenant)
        pipe.zrevrange(keys.tenant(tenant), skip, skip + MOVE_CHUNK - 1)

    single, waiting = yield read
    if single is not None and not waiting and not skip:
        waiting = [single[8:]]
    return [text(each) for each in waiting]


@contextmanager
def outboxes_delivered(opened: OpenQueue, options: Options, *, wants_all: bool) -> Iterator[None]:
    """Store the messages in their homes that a killed mover had taken out, so that the block finds them.

    When replicas are missing, the block runs without some of these messages, which is logged.

    Args:
        opened: A queue.
        options: The app's settings.
        wants_all: Whether the block is not complete without these messages.

    Raises:
        TooFewReplicas: The block has run, and is not complete.
    """
    missing = None
    if opened.homes.before is not None:
        try:
            TenantMoves(opened.client, opened.partitions, options).deliver_outboxes()
        except TooFewReplicas as exc:
            missing, queue = exc, opened.partitions[0].keys.queue
            logger.warning(
                "Queue %s: messages that a change of its partitions has taken out stay out of their homes, "
                "and a command goes on without them: %s",
                queue,
                exc,
                extra={"event": "outbox_not_delivered", "queue": queue},
            )
    yield
    if missing is not None and wants_all:
        raise TooFewReplicas(f"The command is done, except for some messages: {missing}") from missing
