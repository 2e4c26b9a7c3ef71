"""Publishers, a worker and a mover of one partitioned queue, with a ledger that does not ask the broker.

Each step is drawn from a seed. The mover is killed before or after a script, and every publisher keeps
the map that it knows until it is refused.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import redis

from celery_dq import TenantMoving
from celery_dq.app.api import broker, map_change, tenant_moves, tenant_settings
from celery_dq.app.api.broker import partitions_of, stored_maps
from celery_dq.transport.message_record import MessageRecord
from celery_dq.transport.redis.store.message_ids import task_id_of
from celery_dq.transport.redis.store.partition import Partition
from celery_dq.transport.redis.store.script_calls import PipelinedConnection, ScriptCall
from tests.broker.kombu_client import KombuClient

TENANTS = [f"shop-{number}" for number in range(12)]


class Killed(BaseException):
    """A SIGKILL of the mover."""


class MovingWorld:
    """One queue, ``push``.

    Args:
        app: An app on the tenant broker.
        url: URL of its server for redis-py.
        seed: Decides all that happens.
    """

    def __init__(self, app: Any, url: str, seed: int) -> None:
        self.app = app
        self.random = random.Random(seed)
        self.kombu = KombuClient(url)
        self.publishers = [self.kombu.connect() for _ in range(3)]
        self.published: dict[str, list[str]] = defaultdict(list)
        self.delayed: set[str] = set()
        #: Tasks whose cancellation was asked for, that were cancelled for sure, and that were discarded.
        self.asked: set[str] = set()
        self.cancelled: set[str] = set()
        self.discarded: set[str] = set()
        self.ran: dict[str, list[str]] = defaultdict(list)
        self.held: list[tuple[Partition, Any, str]] = []
        self.kills = 0
        self._numbers: Counter[str] = Counter()

    # -- actors

    def publish(self) -> None:
        """Publish some messages of a tenant, whose first answer may be lost."""
        publisher, tenant = self.random.choice(self.publishers), self.random.choice(TENANTS)
        for _ in range(self.random.randint(1, 4)):
            self._numbers[tenant] += 1
            task_id = f"{tenant}/{self._numbers[tenant]}"
            headers = {"id": task_id, "task": "notify"}
            if self.random.random() < 0.1:
                headers["eta"] = "2030-01-01T00:00:00+00:00"
                self.delayed.add(task_id)
            else:
                self.published[tenant].append(task_id)
            with pytest.MonkeyPatch.context() as patch:
                if self.random.random() < 0.2:
                    self._lose_next_answer(patch)
                policy = {"max_retries": 3, "interval_start": 0, "interval_step": 0}
                self.kombu.publish(
                    [], connection=publisher, tenant=tenant, headers=headers, retry=True, retry_policy=policy
                )

    def _lose_next_answer(self, patch: pytest.MonkeyPatch) -> None:
        ask = PipelinedConnection.ask
        is_lost: list[bool] = []

        def once(connection: PipelinedConnection, command: tuple[Any, ...]) -> Any:
            answer = ask(connection, command)
            if not is_lost:
                is_lost.append(True)
                raise redis.ConnectionError("the answer was lost")
            return answer

        patch.setattr(PipelinedConnection, "ask", once)

    def claim(self) -> None:
        with self._partitions() as (partitions, client):
            for partition in self.random.sample(partitions, len(partitions)):
                want = self.random.randint(1, 3)
                for entry in partition.claim("w", lease_ms=600_000, want=want).run(client).entries:
                    tenant, task_id = MessageRecord.unpack(entry.record).tenant, task_id_of(entry.id)
                    if entry.reason:
                        assert task_id in self.asked
                        self.discarded.add(task_id)
                        partition.ack("w", finish=[entry.tag]).run(client)
                        continue
                    self.check_claimed(partition, entry, tenant)
                    self.held.append((partition, entry, tenant))

    def check_claimed(self, partition: Partition, entry: Any, tenant: str) -> None:
        """Check that a message may run beside those that run."""
        here = {each.keys.partition for each, _, name in self.held if name == tenant}
        assert here <= {partition.keys.partition}, f"{tenant} runs in two partitions"

    def end(self) -> None:
        """End some in-flight messages, which may have been claimed before the last change of the map."""
        with self._partitions() as (_, client):
            while self.held and self.random.random() < 0.8:
                partition, entry, tenant = self.held.pop(0)
                if self.random.random() < 0.1:
                    rest = [each for each in self.held if each[2] == tenant]
                    self.held = [each for each in self.held if each[2] != tenant]
                    # The last ones first, so that the claims after it see the old order.
                    for home, each, _ in [*reversed(rest), (partition, entry, tenant)]:
                        home.release("w", [each.tag], mode="requeue").run(client)
                    continue
                assert partition.ack("w", finish=[entry.tag]).run(client) == 0
                self.ran[tenant].append(task_id_of(entry.id))

    def cancel(self) -> None:
        """Cancel a task, wherever it is."""
        tenant = self.random.choice(TENANTS)
        if self.published[tenant]:
            task_id = self.random.choice(self.published[tenant])
            self.asked.add(task_id)
            if self.app.dq.queues["push"].cancel(task_id) in ("waiting", "delayed"):
                self.cancelled.add(task_id)

    def move(self, count: int, kill_after: int | None) -> bool:
        """Change the number of partitions; return whether the change is complete.

        Args:
            count: The new number.
            kill_after: Scripts after which the mover is killed; None for never.
        """
        return self.change(lambda: self.app.dq.queues["push"].set_partitions(count, timeout=0), kill_after)

    def change(self, action: Callable[[], object], kill_after: int | None) -> bool:
        """Change the map; return whether the change is complete. The arguments are those of :meth:`move`."""
        with pytest.MonkeyPatch.context() as patch:
            if kill_after is not None:
                self._kill(patch, kill_after, before=self.random.random() < 0.5)
            try:
                action()
            except Killed:
                self.kills += 1
                return False
            except TenantMoving:
                return False
            return True

    def _kill(self, patch: pytest.MonkeyPatch, after: int, before: bool) -> None:
        left = [after]

        def dying(action: Callable[..., Any]) -> Callable[..., Any]:
            def wrapped(*args: Any, **kwargs: Any) -> Any:
                left[0] -= 1
                if left[0] == 0 and before:
                    raise Killed
                answer = action(*args, **kwargs)
                if left[0] == 0:
                    raise Killed
                return answer

            return wrapped

        patch.setattr(ScriptCall, "run", dying(ScriptCall.run))
        for module, name in (
            (broker, "run_all"),
            (map_change, "follow"),
            (tenant_settings, "run_all"),
            (tenant_settings, "run_rounds"),
            (tenant_moves, "run_one"),
        ):
            patch.setattr(module, name, dying(getattr(module, name)))

    # -- verdict

    def drain(self) -> None:
        for _ in range(2000):
            self.claim()
            while self.held:
                partition, entry, tenant = self.held.pop(0)
                with self._partitions() as (_, client):
                    assert partition.ack("w", finish=[entry.tag]).run(client) == 0
                self.ran[tenant].append(task_id_of(entry.id))
            now = self.app.dq.queues["push"].snapshot()
            if now.waiting + now.discards == 0:
                return

    def verdict(self) -> dict[str, Any]:
        """Compare the ledger with what ran: lost, doubled, and in a wrong order."""
        lost: list[str] = []
        doubled: list[str] = []
        revoked: list[str] = []
        disordered: list[Any] = []
        for tenant in TENANTS:
            ran = self.ran[tenant]
            wanted = [each for each in self.published[tenant] if each not in self.discarded]
            revoked += sorted(self.cancelled.intersection(ran))
            lost += sorted(set(wanted) - set(ran))
            doubled += sorted(each for each, number in Counter(ran).items() if number > 1)
            if ran != [each for each in wanted if each in set(ran)]:
                disordered.append((tenant, ran, wanted))
        return {"lost": lost, "doubled": doubled, "disordered": disordered, "revoked": revoked}

    @contextmanager
    def _partitions(self) -> Iterator[tuple[list[Partition], Any]]:
        with self.app.dq._broker.channel() as channel:
            (homes,) = stored_maps(channel, ["push"], declare=False)
            yield list(partitions_of(channel, "push", homes)), channel.client
