"""Elections, terms, and the report of a leader that resigns."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

TESTS = "tests/leadership/"

MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        "singleton",
        "a leader of the past is shown as if it led",
        "inspector/leaders.py",
        "if leader is None or candidates[:1] != (leader.who,):",
        "if leader is None:",
        (TESTS + "test_leaders.py", "-k", "until_it_resigns"),
    ),
    Mutation(
        "singleton",
        "trust in an election counts from the answer",
        "leadership/elector.py",
        "self.name, won.token, sent_at, self.election.session_s, self._clock,",
        "self.name, won.token, self._clock.monotonic(), self.election.session_s, self._clock,",
        (TESTS + "test_elected_terms.py", "-k", "won_the_election"),
    ),
    Mutation(
        "singleton",
        "trust in a term counts from the answer to a renewal",
        "leadership/elector.py",
        "if term.confirmed(sent_at):",
        "if term.confirmed(self._clock.monotonic()):",
        (TESTS + "test_elected_terms.py", "-k", "renewal"),
    ),
    Mutation(
        "singleton",
        "the previous leader needs no grace, even after a third one",
        "leadership/elector.py",
        "was_clean = won.clean or (won.former > 0 and won.former == self._clean_term)",
        "was_clean = won.clean or won.former > 0",
        (TESTS + "test_grace.py",),
    ),
    Mutation(
        "singleton",
        "a clean hand-over that got no answer is forgotten by the next try",
        "leadership/elector.py",
        "self._resignation_pending = clean or bool(self._resignation_pending)",
        "self._resignation_pending = clean",
        (TESTS + "test_resignations.py",),
    ),
    Mutation(
        "singleton",
        "a term is not renewed at once when the connection has broken or is whole again",
        "leadership/elector.py",
        "self._session_changed = True\n        self._wake_event.set()",
        "self._wake_event.set()",
        (TESTS + "test_states.py",),
    ),
    Mutation(
        "singleton",
        "what was taken in time starts although the connection is broken",
        "leadership/career.py",
        "sure = not self._suspended and self._clock.monotonic() < self._doubt_at",
        "sure = self._clock.monotonic() < self._doubt_at",
        (TESTS + "test_career.py",),
    ),
    Mutation(
        "singleton",
        "a leader that dies after one that handed over seems to have handed over",
        "leadership/campaign.lua",
        "'since', ARGV[4], 'clean', '0',",
        "'since', ARGV[4],",
        (TESTS + "test_election.py",),
    ),
    Mutation(
        "singleton",
        "a late renewal of an earlier term renews the present one of the same candidate",
        "leadership/renew.lua",
        "if seen[2] ~= ARGV[1] or seen[1] ~= ARGV[2] or tonumber",
        "if seen[2] ~= ARGV[1] or tonumber",
        (TESTS + "test_refusals.py", "-k", "not_renewed"),
    ),
    Mutation(
        "singleton",
        "a token by ZooKeeper may be one that the broker has seen",
        "leadership/zookeeper_election.py",
        'token = max(int(epoch["token"]), floor) + 1',
        'token = int(epoch["token"]) + 1',
        (TESTS + "test_election.py",),
    ),
    Mutation(
        "singleton",
        "a resignation that got no answer is not repeated",
        "leadership/redis_election.py",
        '            self._run("resign", keys, self.who, self._token, "1" if clean else "0")',
        (
            "            token, self._token = self._token, 0\n"
            '            self._run("resign", keys, self.who, token, "1" if clean else "0")'
        ),
        (TESTS + "test_resignations.py",),
    ),
)
