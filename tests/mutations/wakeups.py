"""The wake-ups and back-offs of a consumer of several queues."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        "fairness",
        "the queue that was served is served first again",
        "transport/redis/consuming/wakeups.py",
        "self.members.pop(key, None)",
        "self.members.get(key)",
        ("tests/broker/test_lost_wakeups.py", "-k", "served_last"),
    ),
    Mutation(
        "fairness",
        "a free slot does not end the back-off of the only queue with work",
        "transport/redis/consuming/fetcher.py",
        "        self._ready.end_backoffs(free)\n",
        "",
        ("tests/broker/test_lost_wakeups.py", "-k", "becomes_free"),
    ),
    Mutation(
        "fairness",
        "a claim counts the slots that those of other queues may use",
        "transport/redis/consuming/fetcher.py",
        "all_free if free else 0",
        "all_free",
        ("tests/broker/test_lost_wakeups.py", "-k", "leave_a_slot"),
    ),
    Mutation(
        "fairness",
        "a claim without a free slot is sent again at once",
        "transport/redis/consuming/subscriptions.py",
        "needs_lead and source.free_at_last_claim > 0",
        "needs_lead",
        ("tests/broker/test_lost_wakeups.py", "-k", "back_off_at_once"),
    ),
    Mutation(
        "custody",
        "a wake-up that comes during a claim is dropped",
        "transport/redis/consuming/fetcher.py",
        "claimed.more or source.is_woken or",
        "claimed.more or",
        ("tests/broker/test_lost_wakeups.py", "-k", "during_a_claim"),
    ),
    Mutation(
        "custody",
        "a wake-up is lost with the wait that a cancelled queue ends",
        "transport/redis/consuming/handovers.py",
        "            for source in group.members.values():\n                self._ready.rely_on(source)\n",
        "            for source in group.members.values():\n                self._ready.wake(source)\n",
        ("tests/broker/test_lost_wakeups.py", "-k", "survives"),
    ),
    Mutation(
        "fairness",
        "next looks are handed over before each brief callback, too",
        "transport/redis/consuming/channel_consumer.py",
        "self._runs_in_loop and not self.pace.is_brief",
        "self._runs_in_loop",
        ("tests/broker/test_brief_callbacks.py", "-k", "no_next_look"),
    ),
    Mutation(
        "custody",
        "one short callback after a long one counts as brief",
        "transport/redis/consuming/callback_pace.py",
        "max(seen_s, FADE * self._longest_s)",
        "seen_s",
        ("tests/unit/test_callback_pace.py",),
    ),
    Mutation(
        "custody",
        "callbacks of unknown length count as brief",
        "transport/redis/consuming/callback_pace.py",
        "self._longest_s = math.inf",
        "self._longest_s = 0.0",
        ("tests/unit/test_callback_pace.py",),
    ),
    Mutation(
        "fairness",
        "a queue keeps its turn in the inbox beside others",
        "transport/redis/consuming/inbox.py",
        "now >= self._turn[1] + TURN_S",
        "now < self._turn[1]",
        ("tests/properties/test_inbox.py",),
    ),
    Mutation(
        "fairness",
        "each message of a queue is a turn of its own in the inbox",
        "transport/redis/consuming/inbox.py",
        "now >= self._turn[1] + TURN_S",
        "now >= self._turn[1]",
        ("tests/properties/test_inbox.py",),
    ),
    Mutation(
        "custody",
        "singleton queues withhold the wake-ups of others",
        "transport/redis/consuming/subscriptions.py",
        "if not source.queue.token)",
        ")",
        ("tests/broker/test_lost_wakeups.py", "-k", "withhold"),
    ),
)
