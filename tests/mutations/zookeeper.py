"""Messages, locks and journals in ZooKeeper: the transport, Curator's queues, the connection."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

TRANSPORT = "tests/zookeeper_transport/"
QUEUES = "tests/curator/"
BASE = "tests/zookeeper/"

MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        "zookeeper",
        "an operator cancels a message that a worker has",
        "app/api/zookeeper_queues.py",
        "steps = [create(lock), delete(path), delete(lock)]",
        "steps = [delete(path)]",
        ("tests/zookeeper_transport/test_app_queues.py", "-k", "claimed_ones_stay"),
    ),
    Mutation(
        "zookeeper",
        "a lost child of a task with a key does not count as a delivery",
        "worker/zookeeper_step.py",
        "        request.message.crashed = crashed\n",
        "        pass\n",
        ("tests/dedup/test_other_processes.py", "-k", "lost_child_counts"),
    ),
    Mutation(
        "zookeeper",
        "a transaction that was made, and whose answer was lost, is made again",
        "zookeeper/idempotent_writer.py",
        "                if not isinstance(refusal.error, BadVersionError):\n",
        "                if True:\n",
        (BASE + "test_transactions.py", "-k", "lost or cleared"),
    ),
    Mutation(
        "zookeeper",
        "a lost request may arrive after its second attempt was refused",
        "zookeeper/idempotent_writer.py",
        "elif self._rule_out(own, stamps, key, deadline):",
        "elif False:",
        (BASE + "test_transactions.py", "-k", "refused_at"),
    ),
    Mutation(
        "zookeeper",
        "after an interrupted transaction, the next one counts as carried out",
        "zookeeper/idempotent_writer.py",
        "                own.stamp = None\n            stamps[key] = stamp\n",
        "                pass\n            stamps[key] = stamp\n",
        (BASE + "test_transactions.py", "-k", "unknown_outcome"),
    ),
    Mutation(
        "zookeeper",
        "each denied transaction leaves a node of its writer",
        "zookeeper/idempotent_writer.py",
        "            except AccessDenied:\n                if not is_repeat:",
        "            except AccessDenied:\n                if False:",
        (BASE + "test_transactions.py", "-k", "denied_transactions"),
    ),
    Mutation(
        "zookeeper",
        "a writer that was idle for a minute and a half is taken for crashed",
        "zookeeper/idempotent_writer.py",
        "stats[0].ctime - self._abandoned_s * 1000",
        "stats[0].ctime - self._abandoned_s",
        (BASE + "test_transactions.py", "-k", "crashed"),
    ),
    Mutation(
        "zookeeper",
        "closing a writer waits for a commit without answer",
        "zookeeper/idempotent_writer.py",
        "own.lock.acquire(timeout=timeout_s)",
        "own.lock.acquire()",
        (BASE + "test_transactions.py", "-k", "closing_a_writer"),
    ),
    Mutation(
        "zookeeper",
        "the lock of an item that was deleted while it was taken stays",
        "zookeeper/item_locks.py",
        "                self.drop([each])\n                taken.gone.append(each)",
        "                taken.gone.append(each)",
        (BASE + "test_transactions.py", "-k", "item_locks"),
    ),
    Mutation(
        "zookeeper",
        "items that were locked in an expired session are finished like any others",
        "zookeeper/item_locks.py",
        "if all(each.presence == presence for each in held):",
        "if presence:",
        (BASE + "test_transactions.py", "-k", "item_locks"),
    ),
    Mutation(
        "zookeeper",
        "a consumer gives back locks of others",
        "zookeeper/item_locks.py",
        "if not isinstance(answer, KazooException) and answer[0] == presence.encode()",
        "if not isinstance(answer, KazooException)",
        (BASE + "test_transactions.py", "-k", "item_locks"),
    ),
    Mutation(
        "zookeeper",
        "an item whose lock was deleted by hand cannot be put back",
        "zookeeper/item_locks.py",
        "if 1 < refusal.index < len(attempt) - 1:",
        "if 1 < refusal.index:",
        (BASE + "test_transactions.py", "-k", "item_locks"),
    ),
    Mutation(
        "zookeeper",
        "a message that was added to a batch without answer counts as stored with it",
        "transport/zookeeper/batch.py",
        "if not self._stamps:",
        "if True:",
        (TRANSPORT + "test_once.py", "-k", "grew"),
    ),
    Mutation(
        "zookeeper",
        "a queue that has a message gets it again when the publish to the second queue is repeated",
        "transport/zookeeper/publisher.py",
        "        stamps[key] = STORED\n",
        "        stamps.pop(key, None)\n",
        (TRANSPORT + "test_once.py", "-k", "second_queue"),
    ),
    Mutation(
        "zookeeper",
        "a forked child publishes under the stamps of its parent",
        "per_process.py",
        "        pid = os.getpid()\n",
        "        pid = 0\n",
        (TRANSPORT + "test_doubts.py", "-k", "forked"),
    ),
    Mutation(
        "zookeeper",
        "what waited for the end of a suspect is not looked at when it has ended",
        "transport/zookeeper/fetcher.py",
        "if is_clear or source.nodes in returned:",
        "if source.nodes in returned:",
        (TRANSPORT + "test_poison.py", "-k", "suspect"),
    ),
    Mutation(
        "zookeeper",
        "a later message is taken in the round that requeues one",
        "transport/zookeeper/fetcher.py",
        "        if returns:\n",
        "        if False:\n",
        (TRANSPORT + "test_queues.py", "-k", "requeueing_keeps"),
    ),
    Mutation(
        "zookeeper",
        "a message that is requeued makes room before its requeue is queued",
        "transport/zookeeper/qos.py",
        (
            "        in_flight.add_outcome(verb, delivery_tag)\n"
            "        self._delivered.pop(delivery_tag, None)\n"
            "        in_flight.wake()"
        ),
        (
            "        self._delivered.pop(delivery_tag, None)\n"
            "        in_flight.add_outcome(verb, delivery_tag)\n"
            "        in_flight.wake()"
        ),
        (TRANSPORT + "test_queues.py", "-k", "no_later_message"),
    ),
    Mutation(
        "zookeeper",
        "the room of a requeued message is found at the next full look",
        "transport/zookeeper/qos.py",
        "        in_flight.wake()\n",
        "        pass\n",
        (TRANSPORT + "test_queues.py", "-k", "no_later_message"),
    ),
    Mutation(
        "zookeeper",
        "a message that was got without a consumer and requeued is not found again",
        "transport/zookeeper/fetcher.py",
        "in (*self._sources, *self._visited):",
        "in self._sources:",
        (TRANSPORT + "test_queues.py", "-k", "got_again"),
    ),
    Mutation(
        "zookeeper",
        "a call for one message is served in the round in which one is requeued",
        "transport/zookeeper/fetcher.py",
        "while self._requests_for_one and not self._in_flight.has_returning:",
        "while self._requests_for_one:",
        (TRANSPORT + "test_queues.py", "-k", "same_round"),
    ),
    Mutation(
        "zookeeper",
        "an answer in doubt is given again for an item that another client has locked since",
        "transport/zookeeper/fetcher.py",
        "if stat is None or stat.ephemeralOwner != requests.session_id:",
        "if stat is None:",
        (TRANSPORT + "test_doubts.py", "-k", "released"),
    ),
    Mutation(
        "zookeeper",
        "a request without answer is sent again without reading the owner of the lock",
        "transport/zookeeper/in_flight.py",
        "            held.doubtful = True\n",
        "            pass\n",
        (TRANSPORT + "test_doubts.py", "-k", "released"),
    ),
    Mutation(
        "zookeeper",
        "the lock stays when a peer took the item before it was read",
        "transport/zookeeper/subscription.py",
        (
            "            requests.wait(requests.client.delete_async(self.nodes.lock(name)))\n"
            "            return"
        ),
        "            return",
        (TRANSPORT + "test_doubts.py", "-k", "a_peer_deletes"),
    ),
    Mutation(
        "zookeeper",
        "who doubts whether it has locked an item deletes the lock of another one",
        "transport/zookeeper/subscription.py",
        "if stat is not None and stat.ephemeralOwner == requests.session_id:",
        "if stat is not None:",
        (TRANSPORT + "test_doubts.py", "-k", "without_the_lock"),
    ),
    Mutation(
        "zookeeper",
        "a dead letter that is due later is served at once when it is replayed",
        "transport/zookeeper/dead_letters.py",
        "if record.due_ms > self._clock.wall() * 1000:",
        "if False:",
        (TRANSPORT + "test_poison.py", "-k", "dead_letter"),
    ),
    Mutation(
        "zookeeper",
        "puts in the background are lost where the queue has no room for them",
        "curator/writer.py",
        "return failed + batch[count:]",
        "return failed",
        (QUEUES + "test_queues.py", "-k", "background"),
    ),
    Mutation(
        "zookeeper",
        "who removes an item and gets no answer keeps its lock",
        "curator/item_ownership.py",
        "            self.drop([name])\n            raise",
        "            raise",
        (QUEUES + "test_faults.py", "-k", "lost_answer"),
    ),
    Mutation(
        "zookeeper",
        "the silence of a server counts from the last look",
        "compat/kazoo_connection.py",
        "if self._silent_since is None:\n            self._silent_since = now",
        "if True:\n            self._silent_since = now",
        (BASE + "test_connection.py", "-k", "dead_server"),
    ),
)
