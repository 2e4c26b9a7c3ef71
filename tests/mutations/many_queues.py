"""The start of a consumer of many queues."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

_CONSUMERS = "tests/broker/test_many_consumers.py"

MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        "rate",
        "each consumer of many asks for its queue by itself",
        "transport/redis/channel.py",
        'if not kwargs.get("nowait"):',
        "if True:",
        (_CONSUMERS, "-k", "begin_in_few"),
    ),
    Mutation(
        "fairness",
        "a consumer without an answer never begins",
        "transport/redis/event_loop.py",
        "        self.start_consumers()\n",
        "",
        (_CONSUMERS, "-k", "next_turn"),
    ),
    Mutation(
        "custody",
        "a consumer that was cancelled before it began begins",
        "transport/redis/channel.py",
        "            self._starting.pop(consumer_tag, None)\n",
        "",
        (_CONSUMERS, "-k", "never_begins"),
    ),
    Mutation(
        "fairness",
        "the other consumers end with a refused one",
        "transport/redis/event_loop.py",
        "[queue for queue, *_ in self._starting.values()]",
        "[self._starting.popitem()[1][0] for _ in tuple(self._starting)]",
        (_CONSUMERS, "-k", "refused_consumer"),
    ),
    Mutation(
        "rate",
        "the settings are applied without an end while partitions change",
        "transport/redis/connection_context.py",
        "for _ in range(ROUTINGS):",
        "for _ in range(1000):",
        ("tests/broker/test_partitions.py", "-k", "attempt_to_consume"),
    ),
    Mutation(
        "rate",
        "a worker declares its queues one by one",
        "worker/bootsteps.py",
        "if connection is consumer.connection else ()",
        "if connection is None else ()",
        (_CONSUMERS, "-k", "a_worker_declares"),
    ),
    Mutation(
        "rate",
        "a consumer claims from each empty queue before the others",
        "transport/redis/consuming/fetcher.py",
        "            if is_empty:\n",
        "            if False:\n",
        (_CONSUMERS, "-k", "claims_nothing"),
    ),
    Mutation(
        "rate",
        "the leases on empty queues wait for the second heartbeat",
        "transport/redis/event_loop.py",
        "        if self.ahead.has_empty:\n",
        "        if False:\n",
        (_CONSUMERS, "-k", "claims_nothing"),
    ),
    Mutation(
        "rate",
        "an answer of before the consumers began is used later",
        "transport/redis/channel.py",
        "            self.ahead.clear()\n",
        "",
        (_CONSUMERS, "-k", "of_a_worker"),
    ),
    Mutation(
        "rate",
        "a message count of a moment ago answers who only asks",
        "transport/redis/declared_ahead.py",
        "        if passive:\n",
        "        if False:\n",
        (_CONSUMERS, "-k", "message_count_ahead"),
    ),
    Mutation(
        "rate",
        "a message count of before a purge answers later",
        "transport/redis/channel.py",
        "        self.ahead.forget(queue)  # its size is another one now\n",
        "",
        (_CONSUMERS, "-k", "ends_with_a_purge"),
    ),
    Mutation(
        "rate",
        "the error of one queue is that of all",
        "transport/redis/declared_ahead.py",
        "except (redis.ResponseError, ConfigurationError):",
        "except redis.ResponseError:",
        (_CONSUMERS, "-k", "stays_with"),
    ),
)
