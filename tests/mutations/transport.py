"""The Python half of the tenant broker: in-flight messages, claims, acks and publishes of a process."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        "custody",
        "releases that got no answer are forgotten",
        "transport/in_flight/in_flight_messages.py",
        "        box.releases.extendleft(reversed(list(releases)))\n",
        "",
        (
            "tests/broker/test_lost_requests.py",
            "-k",
            "release_that",
        ),
    ),
    Mutation(
        "custody",
        "a claim whose connection broke counts as answered",
        "transport/redis/in_flight/script_pipeline.py",
        "# The claim may have taken messages.\n            in_doubt.claim_unanswered(key)\n",
        "# The claim may have taken messages.\n            in_doubt.claim_answered(key, ())\n",
        (
            "tests/broker/test_lost_requests.py",
            "-k",
            "two_looks",
        ),
    ),
    Mutation(
        "custody",
        "a batch is forgotten before it is answered",
        "transport/redis/store/publish_batch.py",
        (
            "                self._push(queue, [stamped for _, stamped in self._waiting[:run]])\n"
            "                del self._waiting[:run]\n"
        ),
        (
            "                batch = [stamped for _, stamped in self._waiting[:run]]\n"
            "                del self._waiting[:run]\n"
            "                self._push(queue, batch)\n"
        ),
        (
            "tests/broker/test_publishing_once.py",
            "-k",
            "next_flush",
        ),
    ),
    Mutation(
        "recovery",
        "an exiting worker resigns before it has sent its pending acks",
        "transport/redis/in_flight/heartbeat.py",
        (
            "            for queue in list(self._queues.values()):\n"
            "                self.send_pending_acks(queue, client)\n"
            "            self._resign(list(self._queues.values()), client)\n"
        ),
        (
            "            self._resign(list(self._queues.values()), client)\n"
            "            for queue in list(self._queues.values()):\n"
            "                self.send_pending_acks(queue, client)\n"
        ),
        (
            "tests/broker/test_lost_requests.py",
            "-k",
            "exit",
        ),
    ),
    Mutation(
        "heartbeat",
        "an unknown message is released at the first look",
        "transport/redis/in_flight/in_doubt.py",
        "confirmed = strangers & seen_before",
        "confirmed = strangers",
        (
            "tests/broker/test_lost_requests.py",
            "-k",
            "two_looks",
        ),
    ),
    Mutation(
        "heartbeat",
        "a lease is trusted from the answer to its renewal",
        "transport/redis/in_flight/consumer_identity.py",
        "self.in_flight.record_renewal(queue.key, sent_at)",
        "self.in_flight.record_renewal(queue.key, self.clock.monotonic())",
        (
            "tests/broker/test_lost_requests.py",
            "-k",
            "renew",
        ),
    ),
    Mutation(
        "heartbeat",
        "the last claim under a lost lease counts as ours",
        "transport/in_flight/in_flight_messages.py",
        "if int(claim) <= self._void_up_to.get(partition, -1):",
        "if int(claim) < self._void_up_to.get(partition, -1):",
        ("tests/broker/test_void_claims.py",),
    ),
    Mutation(
        "heartbeat",
        "a lease ends while an acknowledgement is on its way",
        "transport/redis/in_flight/heartbeat.py",
        " or self._process.in_doubt.is_unsettled(name)\n",
        "\n",
        (
            "tests/broker/test_lost_requests.py",
            "-k",
            "lasts_until",
        ),
    ),
    Mutation(
        "heartbeat",
        "a heartbeat that one queue refuses costs the others their leases",
        "transport/redis/in_flight/heartbeat.py",
        "if isinstance(recognised_error(exc), PASSING_ERRORS):",
        "if isinstance(exc, redis.ResponseError):",
        ("tests/broker/test_many_queues.py", "-k", "refuses"),
    ),
    Mutation(
        "rate",
        "a task that has started is released with its token",
        "transport/in_flight/qos.py",
        '"requeue" if message.started else "unstarted"',
        '"unstarted"',
        (
            "tests/broker/test_claim_rates.py",
            "-k",
            "given_has_cost",
        ),
    ),
    Mutation(
        "fairness",
        "a tenant keeps the turn in the inbox until it has nothing left",
        "transport/redis/consuming/inbox.py",
        ("            if served is not None:\n                lines[served] = lines.pop(served)\n"),
        "",
        (
            "tests/broker/test_plain_kombu.py",
            "-k",
            "quiet",
        ),
    ),
    Mutation(
        "fairness",
        "messages claimed ahead wait behind a long task while another worker is idle",
        "transport/redis/consuming/channel_consumer.py",
        "if is_late and self.overdue_at() is not None:",
        "if False:",
        ("tests/broker/test_claim_ahead.py", "-k", "do_not_wait and long"),
    ),
    Mutation(
        "fairness",
        "messages that waited longer than the claim-ahead time do not shrink the window",
        "transport/redis/consuming/claim_limits.py",
        "else -LATE_WEIGHT",
        "else 1",
        ("tests/unit/test_claim_window.py",),
    ),
    Mutation(
        "fairness",
        "a worker with worker_disable_prefetch claims ahead once a slot is free",
        "transport/redis/consuming/claim_limits.py",
        "limit = 0 if is_gated else min(",
        "limit = min(",
        ("tests/broker/test_claim_ahead.py", "-k", "disable"),
    ),
    Mutation(
        "poison",
        "a worker that runs a suspect claims another one",
        "transport/redis/consuming/fetcher.py",
        "suspects=leads and not self._runs_suspect,",
        "suspects=leads,",
        (
            "tests/broker/test_appointments.py",
            "-k",
            "suspect",
        ),
    ),
    Mutation(
        "poison",
        "two claims under way bring a suspect each",
        "transport/redis/consuming/claim_limits.py",
        "        return self._leader == key\n",
        "        return True\n",
        ("tests/broker/test_many_queues.py", "-k", "suspect"),
    ),
    Mutation(
        "custody",
        "the claims under way take more messages than there is room for",
        "transport/redis/consuming/fetcher.py",
        "want - claims.may_bring, max(",
        "want, max(",
        ("tests/broker/test_many_queues.py", "-k", "share"),
    ),
    Mutation(
        "fairness",
        "a backlog in one queue hides the messages of an idle one",
        "transport/redis/consuming/wakeups.py",
        "        self._ask(now)\n",
        "",
        ("tests/broker/test_many_queues.py", "-k", "hide"),
    ),
    Mutation(
        "heartbeat",
        "a round trip renews the leases of one chunk of queues only",
        "transport/redis/in_flight/heartbeat.py",
        "        for chunk in chunks(kept):\n",
        "        for chunk in list(chunks(kept))[:1]:\n",
        ("tests/broker/test_many_queues.py", "-k", "refuses"),
    ),
    Mutation(
        "heartbeat",
        "a broken connection costs the answers that a round trip has brought",
        "transport/redis/store/script_batches.py",
        "answers += [exc] * (len(commands) - len(answers))",
        "raise",
        ("tests/broker/test_heartbeat_trips.py", "-k", "lost_lease"),
    ),
    Mutation(
        "heartbeat",
        "an error of one queue hides the answers of the next ones",
        "transport/redis/in_flight/heartbeat.py",
        "                failure = failure or exc\n",
        "                raise\n",
        ("tests/broker/test_heartbeat_trips.py", "-k", "next"),
    ),
    Mutation(
        "heartbeat",
        "messages go on though the lost answer may be that their lease was lost",
        "transport/redis/in_flight/heartbeat.py",
        "                process.not_renewed(queue, exc)\n",
        "",
        ("tests/broker/test_heartbeat_trips.py", "-k", "released"),
    ),
    Mutation(
        "heartbeat",
        "each queue of a round trip moves as many messages as one alone",
        "transport/redis/store/script_batches.py",
        "max(messages // calls, MIN_SHARE)",
        "messages",
        ("tests/broker/test_heartbeat_trips.py", "-k", "share"),
    ),
    Mutation(
        "recovery",
        "a socket that a connection opens again is not watched",
        "compat/redis_sockets.py",
        "            opens()\n",
        "",
        ("tests/broker/test_plain_kombu.py", "tests/broker/test_waking.py", "-x"),
    ),
    Mutation(
        "heartbeat",
        "a settle of a partition without a lease is due for ever",
        "transport/redis/in_flight/script_pipeline.py",
        "            if queue is not None:\n",
        "            if True:\n",
        ("tests/broker/test_heartbeat_trips.py", "-k", "without_a_lease"),
    ),
    Mutation(
        "poison",
        "a delivery that has lost its pool process does not count",
        "transport/in_flight/qos.py",
        '"crashed" if message.crashed else "requeue"',
        '"requeue"',
        (
            "tests/broker/test_lives.py",
            "-k",
            "result_backend_refuses",
        ),
    ),
    Mutation(
        "eta",
        "a worker without room keeps the appointments that have come",
        "transport/redis/consuming/fetcher.py",
        "            else:\n                for source in tuple(islice(",
        "            elif want < 0:\n                for source in tuple(islice(",
        (
            "tests/broker/test_appointments.py",
            "-k",
            "each_next_look_on",
        ),
    ),
    Mutation(
        "eta",
        "a worker that is about to be busy keeps its appointment",
        "transport/redis/consuming/fetcher.py",
        "for source in self._ready.awaited():",
        "for source in tuple(self._ready.relied_on):",
        (
            "tests/broker/test_appointments.py",
            "-k",
            "before_the_task_of_another_queue",
        ),
    ),
    Mutation(
        "eta",
        "no answer to a handed-over wake-up is read before a task that blocks the loop",
        "transport/redis/consuming/fetcher.py",
        "if self.pipeline.hands_over_wakeup():",
        "if any(group.is_waiting for group in self.wakeups):",
        (
            "tests/broker/test_appointments.py",
            "-k",
            "before_a_task",
        ),
    ),
    Mutation(
        "eta",
        "an ETA without a zone is local time",
        "transport/message_times.py",
        "value = value.replace(tzinfo=timezone.utc)",
        "value = value.astimezone()",
        (
            "tests/broker/test_clocks.py",
            "-k",
            "without_a_zone",
        ),
    ),
    Mutation(
        "once",
        "messages of two lanes leave in one push",
        "transport/redis/store/publish_batch.py",
        "                    and self._waiting[run][1].sequence == first.sequence\n",
        "",
        (
            "tests/broker/test_publishing_once.py",
            "-k",
            "stamped",
        ),
    ),
    Mutation(
        "revoke",
        "basic_get returns a cancelled message",
        "transport/redis/channel.py",
        ("                if entry.reason:\n                    continue\n"),
        "",
        (
            "tests/broker/test_plain_kombu.py",
            "-k",
            "goes_past",
        ),
    ),
    Mutation(
        "recovery",
        "messages of a claim on its way are released",
        "transport/redis/in_flight/in_doubt.py",
        "if self._claims.get(partition):",
        "if False:",
        ("tests/broker/test_lost_requests.py", "-k", "claim_on_its_way_are"),
    ),
    Mutation(
        "custody",
        "a heartbeat whose report got no answer forgets the report",
        "transport/in_flight/send_acks.py",
        "        in_flight.restore_acks(name, settles, finishes, releases, letters)\n        raise",
        "        raise",
        ("tests/broker/test_lost_requests.py", "tests/broker/test_lost_answers.py"),
    ),
    Mutation(
        "heartbeat",
        "the older one of two renewals decides until when a lease is trusted",
        "transport/in_flight/in_flight_messages.py",
        'if sent_at > self._renewed.get(partition, float("-inf")):',
        "if True:",
        ("tests/broker/test_void_claims.py", "-k", "sent_last"),
    ),
    Mutation(
        "heartbeat",
        "what plain kombu's consumer holds is dropped when the lease is lost",
        "transport/in_flight/in_flight_messages.py",
        "and not (held.settled or held.delivered)",
        "and not held.settled",
        ("tests/broker/test_void_claims.py", "-k", "plain_kombu"),
    ),
    Mutation(
        "custody",
        "an answer that another one has overtaken looks like lost data",
        "transport/redis/in_flight/data_loss.py",
        "if known is not None and sent_at < known.read_at:",
        "if False:",
        ("tests/broker/test_data_loss.py", "-k", "overtaken"),
    ),
)
