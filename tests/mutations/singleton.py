"""Singleton queues: terms, the guard, hand-overs, and leaders on brokers without elections."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

TESTS = "tests/singleton/"

MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        "singleton",
        "a message whose start fails after it waited for a slot stops its queue",
        "worker/singleton_sequencer.py",
        "                message.forgotten(requeue=True)\n",
        "                pass\n",
        ("tests/singleton/test_terms.py", "-k", "stops_no_worker"),
    ),
    Mutation(
        "singleton",
        "a leader consumes before it is inaugurated",
        "singleton/leaderships.py",
        "return term.token if term is not None and term.phase is Phase.EXECUTING else 0",
        "return term.token if term is not None else 0",
        (TESTS + "test_duties.py::test_nothing_is_consumed_before_the_inauguration_is_over",),
    ),
    Mutation(
        "singleton",
        "a server that has lost its data hands out a token that this worker had",
        "singleton/leaderships.py",
        "return max(epoch, self._highest)",
        "return epoch",
        (TESTS + "test_elections.py::test_a_server_that_forgets_everything_hands_out_no_token_again",),
    ),
    Mutation(
        "singleton",
        "a fallen leader does not wait for the message that it runs",
        "singleton/leaderships.py",
        "if not self._guard.runs(term.name) and (\n",
        "if (\n",
        (TESTS + "test_duties.py", "-k", "until_the_process"),
    ),
    Mutation(
        "singleton",
        "hand_over runs before the last message has ended",
        "singleton/leaderships.py",
        (
            "            self._wait_for_running(term)\n"
            "            if career is not None:\n"
            "                career.hand_over()\n"
        ),
        (
            "            if career is not None:\n"
            "                career.hand_over()\n"
            "            self._wait_for_running(term)\n"
        ),
        (TESTS + "test_duties.py::test_the_last_message_has_ended_before_the_hand_over",),
    ),
    Mutation(
        "singleton",
        "a renewal during the hand-over revives a revoked term",
        "singleton/guard.py",
        "if token <= self._revoked.get(queue, 0):",
        "if token < self._revoked.get(queue, 0):",
        (TESTS + "test_guard.py::test_a_revoked_term_is_not_trusted_again",),
    ),
    Mutation(
        "singleton",
        "a task's own handler of SIGALRM outlives it",
        "singleton/guard.py",
        "if watch.alarm_at != until or watch.is_foreign:",
        "if watch.alarm_at != until:",
        (TESTS + "test_guard.py::test_a_handler_that_a_task_has_left_behind_does_not_outlive_the_next_look",),
    ),
    Mutation(
        "singleton",
        "a worker that is elected again while it is cut off leads for a moment",
        "worker/singleton_sequencer.py",
        "now - max(min(silent), queue.judged_at) >= self._lease_s",
        "now - min(silent) >= self._lease_s",
        (TESTS + "test_terms.py", "-k", "cut_off"),
    ),
    Mutation(
        "singleton",
        "a message that has waited for a slot starts after its term",
        "worker/singleton_message.py",
        "if self.is_over or not self._stands():",
        "if self.is_over:",
        (TESTS + "test_terms.py", "-k", "offered_after_its_term"),
    ),
    Mutation(
        "singleton",
        "a message that comes when its term has ended stays in the worker",
        "worker/singleton_sequencer.py",
        (
            "            queue.held.append(message)\n"
            "            if queue.source is not source:\n"
            "                self._release(queue)\n"
        ),
        "            queue.held.append(message)\n",
        (TESTS + "test_terms.py", "-k", "sent_after_the_end"),
    ),
    Mutation(
        "singleton",
        "a message that was over without the pool holds up those behind it",
        "worker/ready_requests.py",
        "return any(before.done for before, _ in self._waiting.values())",
        "return False",
        (TESTS + "test_ready_requests.py", "-k", "behind_a_revoked_one"),
    ),
    Mutation(
        "singleton",
        "a message that came back is forgotten when the one behind it is over",
        "transport/redis/consuming/singleton_delivery.py",
        "own.out_of_order = held.will_return or own.out_of_order",
        "own.out_of_order = held.will_return",
        (TESTS + "test_singleton_delivery.py", "-k", "behind_it_is_over"),
    ),
    Mutation(
        "singleton",
        "a message begins although the dead letter before it is not confirmed",
        "transport/in_flight/pending_acks.py",
        "return self.done and self.dead_letter and not self.confirmed",
        "return False",
        (TESTS + "test_singleton_delivery.py", "-k", "dead_letter"),
    ),
    Mutation(
        "singleton",
        "a message begins although a late ack is not confirmed",
        "transport/redis/consuming/singleton_delivery.py",
        "unconfirmed[0].confirmed or unconfirmed[0].has_returned",
        "unconfirmed[0].confirmed or unconfirmed[0].done",
        (TESTS + "test_lost_acks.py", "-k", "heartbeat"),
    ),
    Mutation(
        "singleton",
        "the wait for a confirmation counts as service time",
        "transport/redis/consuming/singleton_delivery.py",
        "                own.started_at = self._process.clock.monotonic()\n        if len(unconfirmed)",
        "                pass\n        if len(unconfirmed)",
        (TESTS + "test_singleton_delivery.py", "-k", "no_service_time"),
    ),
    Mutation(
        "singleton",
        "each message that ends during the answer to an ack costs a call of its own",
        "transport/redis/consuming/singleton_delivery.py",
        "if not pipeline.has_end_under_way(queue):",
        "if True:",
        (TESTS + "test_singleton_delivery.py", "-k", "answer_to_those_under_way"),
    ),
    Mutation(
        "singleton",
        "an ack of the loop overtakes one that the heartbeat sends",
        "transport/redis/in_flight/script_pipeline.py",
        "return not queue.token or self._process.in_doubt.acks_under_way(queue.key) == 1",
        "return True",
        (TESTS + "test_singleton_delivery.py", "-k", "overtakes"),
    ),
    Mutation(
        "singleton",
        "a dead letter overtakes an ack that Redis asks for again",
        "transport/redis/in_flight/script_pipeline.py",
        "while queue.token and len(calls) > 1:",
        "while False:",
        (TESTS + "test_singleton_delivery.py", "-k", "overtakes"),
    ),
    Mutation(
        "singleton",
        "the loop turns without a break until the acks of a singleton queue are answered",
        "transport/redis/in_flight/script_pipeline.py",
        "if queue.token and self._process.in_doubt.acks_under_way(queue.key):",
        "if False:",
        (TESTS + "test_singleton_delivery.py", "-k", "answer_to_those_under_way"),
    ),
    Mutation(
        "singleton",
        "an ack of the heartbeat overtakes one that the loop has sent",
        "transport/redis/in_flight/heartbeat.py",
        "if queue.token and not self._exiting and process.in_doubt.awaits_others(name, interval_s):",
        "if False:",
        (TESTS + "test_singleton_delivery.py", "-k", "overtakes"),
    ),
    Mutation(
        "singleton",
        "each early heartbeat begins its wait for an answer again",
        "transport/redis/in_flight/in_doubt.py",
        "under_way.pop()  # the latest:",
        "under_way.popleft()  # the latest:",
        (TESTS + "test_singleton_delivery.py", "-k", "blocked_loop"),
    ),
    Mutation(
        "singleton",
        "the heartbeat waits for an answer that a blocked loop does not read",
        "transport/redis/in_flight/in_doubt.py",
        "len(sent_at) > 1 and self._clock.monotonic() - sent_at[0] < within_s",
        "len(sent_at) > 1",
        (TESTS + "test_singleton_delivery.py", "-k", "blocked_loop"),
    ),
    Mutation(
        "singleton",
        "the messages of a singleton queue are delivered one by one",
        "transport/redis/consuming/singleton_delivery.py",
        "if len(under_way) * 2 > most:",
        "if len(under_way) >= most:",
        (TESTS + "test_singleton_delivery.py", "-k", "half_of_the_last_ones"),
    ),
    Mutation(
        "singleton",
        "a claim that left before a message came back brings messages that go first",
        "transport/redis/consuming/singleton_delivery.py",
        "own.permit is None or own.discards_claims:",
        "own.permit is None:",
        (TESTS + "test_singleton_delivery.py", "-k", "before_a_message_came_back"),
    ),
    Mutation(
        "singleton",
        "a task of a green pool waits for its own slot",
        "worker/singleton_sequencer.py",
        "self._consumer.timer.call_after(0, self._advance, (queue,))",
        "self._advance(queue)",
        (TESTS + "test_replaced.py", "-k", "take_the_calls and stock-gevent"),
    ),
    Mutation(
        "singleton",
        "the clock of Redis is taken for ahead by half of the way",
        "transport/redis/in_flight/server_clock.py",
        "        seconds, microseconds = client.time()\n",
        "        sent_at = self._clock.monotonic()\n        seconds, microseconds = client.time()\n"
        "        seconds += (self._clock.monotonic() - sent_at) / 2\n",
        ("tests/unit/test_clock.py",),
    ),
)
