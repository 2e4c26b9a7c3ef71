"""The elected beat, and the book in which ticks are numbered."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

TESTS = "tests/beat/"
BOOK = TESTS + "test_schedule_store.py"

MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        "beat",
        "a tick gets the number of the one before whose record is missing",
        "beat/begin.lua",
        "if pending ~= '0' and tonumber(ran_us) < tonumber(ARGV[3]) then",
        "if false then",
        (BOOK,),
    ),
    Mutation(
        "beat",
        "an old leader records that a tick was sent",
        "beat/done.lua",
        "if held > token or pending ~= ARGV[3] then",
        "if pending ~= ARGV[3] then",
        (BOOK,),
    ),
    Mutation(
        "beat",
        "the leader before the last one may begin ticks",
        "beat/adopt.lua",
        "call('HSET', KEYS[1], 'token', token)",
        "call('HSETNX', KEYS[1], 'token', token)",
        (BOOK,),
    ),
    Mutation(
        "beat",
        "taking a book in ZooKeeper over keeps no earlier leader out",
        "beat/schedule_store.py",
        'path, data = self._nodes.entry(name), json.dumps({**stored, "token": token}).encode()',
        "path, data = self._nodes.entry(name), json.dumps(stored).encode()",
        (BOOK,),
    ),
    Mutation(
        "beat",
        "a tick is sent although its number came when the term was in doubt",
        "beat/scheduler.py",
        "if not term.is_firm:",
        "if term.ended:",
        (TESTS + "test_lost_answers.py", "-k", "no_tick"),
    ),
    Mutation(
        "beat",
        "a tick that got no answer counts as sent",
        "beat/scheduler.py",
        "self._is_over(due, not isinstance(error.__context__, SILENCE))",
        "self._is_over(due, True)",
        (TESTS + "test_lost_answers.py", "-k", "repeated"),
    ),
    Mutation(
        "beat",
        "a send that failed leaves its time as the last run",
        "beat/scheduler.py",
        ("            if not sent:\n                set_last_run(due.entry, due.before)\n"),
        "",
        (TESTS + "test_django_celery_beat.py", "-k", "send_that_fails"),
    ),
    Mutation(
        "beat",
        "an entry that cannot be sent is tried again before all others",
        "beat/scheduler.py",
        "{name: max(until - now, 0.0) for name,",
        "{name: 0.0 for name,",
        (TESTS + "test_neighbours.py", "-k", "starves"),
    ),
    Mutation(
        "beat",
        "the state of an entry that has left the schedule stays",
        "beat/scheduler.py",
        "        self.schedule_store.retain(token, set(schedule))\n",
        "",
        (TESTS + "test_neighbours.py", "-k", "deleted or dropped"),
    ),
)
