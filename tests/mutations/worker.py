"""Messages in a worker: its pool, its slots, its dead children, revoked tasks, quotas."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

LIVES = "tests/broker/test_lives.py"

MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        "concurrency",
        "an early ack frees the slot of its tenant",
        "transport/redis/in_flight/message.py",
        "        self.settles = True\n",
        "",
        (LIVES + "::test_an_early_ack_keeps_the_slot_until_the_body_ends",),
    ),
    Mutation(
        "concurrency",
        "a soft time limit frees the slot of its tenant",
        "worker/task_events.py",
        "            if not soft:\n",
        "            if True:\n",
        (LIVES + "::test_a_soft_time_limit_frees_no_slot_while_the_task_goes_on",),
    ),
    Mutation(
        "poison",
        "a lost child whose error is wrapped is no crash",
        "worker/task_events.py",
        'isinstance(getattr(exc, "exc", exc), (',
        "isinstance(exc, (",
        (LIVES + "::test_a_poison_message_ends_among_the_dead_letters_and_its_neighbours_run",),
    ),
    Mutation(
        "poison",
        "a result backend that is down ends the worker that gives up on a message",
        "worker/failed_tasks.py",
        "except Exception:",
        "except OSError:",
        (LIVES, "-k", "result_backend_refuses"),
    ),
    Mutation(
        "custody",
        "a task of a green pool that a cold stop kills counts as done",
        "worker/task_events.py",
        "if self._cancelled and _is_killed(result):",
        "if self._cancelled and not isinstance(result, tuple):",
        ("tests/broker/test_cold_stops.py::test_a_task_that_a_cold_stop_cancels_comes_back[gevent-0.0]",),
    ),
    Mutation(
        "custody",
        "a task whose start fails in its thread stays in the pool for ever",
        "worker/task_events.py",
        "            if self._events.drops_errors:\n",
        "            if False:\n",
        ("tests/unit/test_task_events.py", "-k", "start_fails"),
    ),
    Mutation(
        "custody",
        "an error of one part of a worker keeps the end of a task from the others",
        "worker/task_events.py",
        "            first = first or error\n",
        "            raise\n",
        ("tests/unit/test_task_events.py", "-k", "one_subscriber"),
    ),
    Mutation(
        "dedup",
        "the parts of a worker get the end of a task in the order of their boot steps",
        "worker/task_events.py",
        "        self._subscribers.sort(key=lambda each: ORDER.index(each.role))\n",
        "",
        ("tests/unit/test_task_events.py", "-k", "written_order"),
    ),
    Mutation(
        "dedup",
        "a request passes the gates in the order of their boot steps",
        "worker/task_events.py",
        "dict(sorted({**self._gates, place: receive}.items()))",
        "{**self._gates, place: receive}",
        ("tests/unit/test_task_events.py", "-k", "written_order"),
    ),
    Mutation(
        "revoke",
        "a message of a singleton queue that is revoked in a pool of threads runs",
        "worker/lifecycle.py",
        "request.id in state.revoked and request.revoked():",
        "False:",
        ("tests/singleton/test_ready_requests.py::test_a_revoked_one_is_passed_over",),
    ),
    Mutation(
        "revoke",
        "the discard of one delivery takes back the revocation of the task",
        "worker/capacity.py",
        "                if not known:\n",
        "                if True:\n",
        ("tests/broker/test_discards.py", "-k", "restores_no_revocation"),
    ),
    Mutation(
        "rate",
        "a rate that is not a number is a quota",
        "options/quota.py",
        "if not low <= value <= high:",
        "if value < low or value > high:",
        ("tests/unit/test_quota.py",),
    ),
    Mutation(
        "poison",
        "a task that no child had at a lost connection counts as crashed",
        "worker/lifecycle.py",
        'request.message.release("unstarted")',
        'request.message.release("crashed")',
        ("tests/broker/test_reconnects.py", "-k", "no_child_had"),
    ),
    Mutation(
        "poison",
        "a task that Celery cancels at a lost connection counts as crashed",
        "worker/lifecycle.py",
        'message.release("requeue")',
        'message.release("crashed")',
        ("tests/broker/test_reconnects.py", "-k", "celery_cancels"),
    ),
)
