"""Transactions, transactions that are carried out once, and reading many nodes."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from kazoo.exceptions import BadVersionError, NoNodeError, UnimplementedError
from kazoo.security import make_acl

from celery_dq.errors import AccessDenied, MessageTooLarge, ZooKeeperUnreachable
from celery_dq.testing.waiting import wait_until
from celery_dq.testing.zookeeper import ZooKeeperServer
from celery_dq.zookeeper import idempotent_writer as journal_module
from celery_dq.zookeeper.idempotent_writer import IdempotentWriter, Stamp
from celery_dq.zookeeper.multi_read import read_all, readings
from celery_dq.zookeeper.session import Session, SessionState
from celery_dq.zookeeper.transaction import (
    MAX_REQUEST,
    Step,
    TransactionRefused,
    check,
    create,
    delete,
    set_data,
    size_of,
    transact,
)
from tests.broker.proxy import Proxy
from tests.children import in_child
from tests.curator.expiry import expire

JOURNALS = "/journals"


def test_all_or_nothing(session: Session, client: Any) -> None:
    answers = transact(
        session, [create("/items/a", b"1"), create("/items/s-", sequence=True), check("/items")], 5
    )
    assert answers[:2] == ["/items/a", "/items/s-0000000001"]
    with pytest.raises(TransactionRefused) as refused:
        transact(session, [delete("/items/a"), set_data("/items", b"x", 7), create("/items/b")], 30)
    assert (refused.value.index, refused.value.step.path) == (1, "/items")
    assert isinstance(refused.value.error, BadVersionError)
    assert client.exists("/items/a")
    copy = pickle.loads(pickle.dumps(refused.value))
    assert (copy.index, str(copy)) == (1, str(refused.value))


@pytest.mark.parametrize("spare", [0, -1])
def test_a_transaction_that_fits_is_sent_and_a_larger_one_is_refused(
    session: Session, client: Any, spare: int
) -> None:
    step = create("/items/large", b"")
    room = MAX_REQUEST - size_of([step], client.chroot)
    transact(session, [create("/items/large", b"x" * (room + spare))], 30)
    with pytest.raises(MessageTooLarge):
        transact(session, [create("/items/larger", b"x" * (room + 1))], 30)
    # The connection is still usable.
    assert client.exists("/items/larger") is None


def test_many_nodes_are_read_at_once(session: Session, client: Any) -> None:
    paths = [f"/items/{number}" for number in range(60)]
    for number, path in enumerate(paths[:-1]):
        client.create(path, b"" if number % 2 else b"x" * number)
    found = read_all(session, paths, 30)
    assert [data for data, _stat in found[:-1]] == [
        b"" if number % 2 else b"x" * number for number in range(59)
    ]
    assert found[3][1] == client.exists(paths[3])
    assert isinstance(found[-1], NoNodeError)
    # If a server does not know the request, each node is read by its own request.
    assert readings(session, paths[:-1], [UnimplementedError()], 30) == found[:-1]


def test_a_writer_commits_for_many_threads(session: Session, client: Any) -> None:
    writer = IdempotentWriter(session, JOURNALS)
    failures: list[Exception] = []

    def commit(thread: int) -> None:
        for number in range(10):
            try:
                writer.commit([create(f"/items/{thread}-{number}")], 30)
                writer.commit([create("/missing/x")], 30)
            except TransactionRefused as refusal:
                failures.append(refusal)

    threads = [threading.Thread(target=commit, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(client.get_children("/items")) == len(failures) == 60
    assert len(client.get_children(JOURNALS)) == 1
    writer.close()
    # Closing does not wait long for the deletion of the node.
    wait_until(lambda: client.get_children(JOURNALS) == [])


def test_a_writer_survives_expiry_its_nodes_loss_and_a_fork(session: Session, client: Any) -> None:
    writer = IdempotentWriter(session, JOURNALS)
    step = create("/items/s-", sequence=True)
    writer.commit([step], 30)
    expire(session)
    writer.commit([step], 30)
    (node,) = session.open().get_children(JOURNALS)
    session.open().delete(f"{JOURNALS}/{node}")
    outcomes = writer.commit_each([[step], [create("/missing/x")], [step]], 30)
    assert outcomes[0] == ["/items/s-0000000002"]
    assert isinstance(outcomes[1], TransactionRefused)

    def child() -> None:
        writer.commit([step], 30)
        writer.close()
        session.close()

    in_child(child)
    writer.commit([step], 30)
    assert len(session.open().get_children("/items")) == 6


def test_a_lost_request_and_a_lost_answer_to_the_question_lose_nothing(
    zookeeper: ZooKeeperServer, hosts: str, client: Any
) -> None:
    with Proxy(zookeeper.port) as proxy:
        session = Session(f"127.0.0.1:{proxy.port}/{hosts.partition('/')[2]}", timeout_s=4)
        writer = IdempotentWriter(session, JOURNALS)
        step = create("/items/s-", sequence=True)
        writer.commit([step], 30)
        # The transaction never arrives. The question arrives, also writes the node, and gets no answer.
        proxy.swallow, proxy.swallows_left = JOURNALS.encode(), 1
        lost = threading.Thread(target=writer.commit, args=([step], 60))
        lost.start()
        wait_until(lambda: proxy.swallowed == 1)
        proxy.drop_answers_to, proxy.drops_left = JOURNALS.encode(), 1
        lost.join(60)
        assert proxy.dropped == 1
        assert writer.commit([step], 30) == ["/items/s-0000000002"]
        session.close()
    assert len(client.get_children("/items")) == 3


def test_a_lost_request_that_is_refused_at_the_second_attempt_never_arrives(
    zookeeper: ZooKeeperServer, hosts: str, client: Any
) -> None:
    with Proxy(zookeeper.port) as proxy:
        session = Session(f"127.0.0.1:{proxy.port}/{hosts.partition('/')[2]}", timeout_s=4)
        writer = IdempotentWriter(session, JOURNALS)
        writer.commit([create("/items/a")], 30)
        (node,) = client.get_children(JOURNALS)
        proxy.swallow, proxy.swallows_left = JOURNALS.encode(), 1
        stamps: dict[str, Stamp] = {}
        with pytest.raises(TransactionRefused, match="/missing/x"):
            writer.commit_stamped([create("/missing/x")], 60, stamps, "x", limit=MAX_REQUEST)
        assert proxy.swallowed == 1
        # The condition of the lost request cannot be true any more, and no later attempt takes its stamp.
        assert client.exists(f"{JOURNALS}/{node}") is None
        assert stamps == {}
        writer.commit_stamped([create("/items/b")], 60, stamps, "x", limit=MAX_REQUEST)
        session.close()
    assert sorted(client.get_children("/items")) == ["a", "b"]


def test_a_stamp_whose_node_is_gone_is_not_taken_for_success(session: Session, client: Any) -> None:
    writer = IdempotentWriter(session, JOURNALS)
    stamps = {"x": Stamp(f"{JOURNALS}/gone", 3)}
    with pytest.raises(ZooKeeperUnreachable, match="may have been carried out"):
        writer.commit_stamped([create("/items/a")], 30, stamps, "x", limit=MAX_REQUEST)
    assert stamps == {}
    writer.commit_stamped([create("/items/a")], 30, stamps, "x", limit=MAX_REQUEST)
    assert client.get_children("/items") == ["a"]


#: A transaction is carried out, and its answer is lost.
LOST_ANSWER = (True, ZooKeeperUnreachable())
#: A transaction is not sent, because there is no connection.
NO_CONNECTION = (False, ZooKeeperUnreachable())


@pytest.mark.parametrize("is_stamped", [True, False])
@pytest.mark.parametrize(
    "attempts",
    [
        [(True, KeyboardInterrupt())],
        [LOST_ANSWER, (False, KeyboardInterrupt())],
        [LOST_ANSWER, (False, AccessDenied())],
    ],
    ids=["interrupted", "repeat interrupted", "repeat denied"],
)
def test_a_transaction_of_unknown_outcome_is_not_taken_for_the_next_one(
    session: Session,
    client: Any,
    monkeypatch: pytest.MonkeyPatch,
    attempts: list[tuple[bool, BaseException]],
    is_stamped: bool,
) -> None:
    writer, stamps = IdempotentWriter(session, JOURNALS), dict[str, dict[str, Stamp]]()

    def commit(name: str) -> None:
        steps = [create(f"/items/{name}-", sequence=True)]
        if is_stamped:
            writer.commit_stamped(steps, 30, stamps.setdefault(name, {}), "x", limit=MAX_REQUEST)
        else:
            writer.commit(steps, 30)

    commit("a")
    script = [*attempts, NO_CONNECTION]

    def scripted(session: Session, steps: Sequence[Step], timeout_s: float) -> list[Any]:
        if not script:
            return transact(session, steps, timeout_s)
        is_sent, error = script.pop(0)
        if is_sent:
            transact(session, steps, timeout_s)
        raise error

    monkeypatch.setattr(journal_module, "transact", scripted)
    # The second transaction is carried out, and its caller learns of no outcome.
    with pytest.raises(type(attempts[-1][1])):
        commit("b")
    # The first attempt of the third transaction never arrives.
    commit("c")
    if is_stamped:
        commit("b")
    assert script == []
    assert sorted(name.partition("-")[0] for name in client.get_children("/items")) == ["a", "b", "c"]


def test_transactions_of_unknown_outcome_are_not_sent_again_one_by_one(
    session: Session, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, attempts = IdempotentWriter(session, JOURNALS), [LOST_ANSWER[1], AccessDenied()]

    def scripted(session: Session, steps: Sequence[Step], timeout_s: float) -> list[Any]:
        if len(attempts) != 1:
            transact(session, steps, timeout_s)
        raise attempts.pop(0)

    monkeypatch.setattr(journal_module, "transact", scripted)
    step = create("/items/a-", sequence=True)
    outcomes = writer.commit_each([[step], [step]], 30)
    assert [type(outcome) for outcome in outcomes] == [AccessDenied, AccessDenied]
    assert len(client.get_children("/items")) == 2


def test_denied_transactions_leave_no_further_nodes(session: Session, client: Any) -> None:
    # The folder is open for reading only.
    client.create("/closed", acl=[make_acl("world", "anyone", read=True)])
    writer, stamps = IdempotentWriter(session, JOURNALS), dict[str, Stamp]()
    for _ in range(2):
        with pytest.raises(AccessDenied):
            writer.commit_stamped([create("/closed/a")], 30, stamps, "x", limit=MAX_REQUEST)
        with pytest.raises(AccessDenied):
            writer.commit([create("/closed/a")], 30)
    assert stamps == {}
    writer.commit([create("/items/a")], 30)
    assert len(client.get_children(JOURNALS)) == 1


def test_a_denied_transaction_denies_no_other_one_that_is_sent_with_it(session: Session, client: Any) -> None:
    client.create("/closed", acl=[make_acl("world", "anyone", read=True)])
    writer = IdempotentWriter(session, JOURNALS)
    outcomes = writer.commit_each([[create("/items/a")], [create("/closed/b")], [create("/items/c")]], 30)
    assert (outcomes[0], outcomes[2]) == (["/items/a"], ["/items/c"])
    assert isinstance(outcomes[1], AccessDenied)


def test_a_writer_that_ends_the_attempts_of_another_one_keeps_its_own_node(
    session: Session, client: Any
) -> None:
    writer, closed = IdempotentWriter(session, JOURNALS), IdempotentWriter(session, JOURNALS)
    writer.commit([check("/items")], 30)
    (node,) = client.get_children(JOURNALS)
    closed.commit([check("/items")], 30)
    (other,) = {*client.get_children(JOURNALS)} - {node}
    # The other writer sent a transaction with this stamp, and it never arrived.
    stamps = {"x": Stamp(f"{JOURNALS}/{other}", 1)}
    with pytest.raises(TransactionRefused, match="/missing/x"):
        writer.commit_stamped([create("/missing/x")], 30, stamps, "x", limit=MAX_REQUEST)
    writer.commit([check("/items")], 30)
    assert client.get_children(JOURNALS) == [node]


def test_a_writer_gives_up_in_time(own_zookeeper: ZooKeeperServer) -> None:
    session = Session(own_zookeeper.hosts, timeout_s=2)
    writer = IdempotentWriter(session, JOURNALS)
    writer.commit([create("/a")], 30)
    own_zookeeper.kill()
    with pytest.raises(ZooKeeperUnreachable, match="may have been carried out|did not answer"):
        writer.commit([create("/b")], 0.3)
    own_zookeeper.restart()
    writer.commit([create("/c")], 60)
    session.close()


@pytest.mark.parametrize("lost", ["requests", "answers"])
@pytest.mark.parametrize("names", [("short", "long"), ("long", "short")], ids=" ".join)
def test_callers_whose_transactions_are_sent_together_wait_each_for_its_own_time(
    zookeeper: ZooKeeperServer, hosts: str, client: Any, names: tuple[str, str], lost: str
) -> None:
    timeouts_s, ends = {"short": 0.3, "long": 60.0}, dict[str, ZooKeeperUnreachable | None]()

    def commit(name: str) -> None:
        try:
            writer.commit([create(f"/items/{name}-", sequence=True)], timeouts_s[name])
        except ZooKeeperUnreachable as error:
            ends[name] = error
        else:
            ends[name] = None

    with Proxy(zookeeper.port) as proxy:
        session = Session(f"127.0.0.1:{proxy.port}/{hosts.partition('/')[2]}", timeout_s=30)
        writer = IdempotentWriter(session, JOURNALS)
        writer.commit([check("/items")], 30)
        own, threads = writer._state.get(), [threading.Thread(target=commit, args=(name,)) for name in names]
        # Given two transactions that are sent together while ZooKeeper does not answer
        if lost == "requests":
            proxy.black_hole.set()
        else:
            proxy.drop_answers_to, proxy.drops_left = JOURNALS.encode(), 1_000_000
        with own.lock:
            for waiting, thread in enumerate(threads, 1):
                thread.start()
                wait_until(lambda count=waiting: len(own.waiting) == count)  # type: ignore[misc]
        # When the time of one caller is over, only this one gives up, and so does a third one.
        wait_until(lambda: "short" in ends)
        with pytest.raises(ZooKeeperUnreachable, match="did not answer in time"):
            writer.commit_stamped([create("/items/third")], 0.1, {}, "x", limit=MAX_REQUEST)
        assert isinstance(ends.pop("short"), ZooKeeperUnreachable)
        assert ends == {}
        # Then the other one continues with the same transaction.
        proxy.black_hole.clear()
        proxy.drops_left = 0
        proxy.cut_all()
        for thread in threads:
            thread.join(60)
        assert ends == {"long": None}
        session.close()
    found = [name.partition("-")[0] for name in client.get_children("/items")]
    assert found.count("long") == 1
    assert found.count("short") <= 1


def test_a_transaction_whose_caller_has_given_up_is_not_sent_later(session: Session, client: Any) -> None:
    writer = IdempotentWriter(session, JOURNALS)
    late = threading.Thread(target=writer.commit_each, args=([[create("/items/late")]], 0.05))
    with writer._state.get().lock:
        late.start()
        late.join(10)
        assert not late.is_alive()
    writer.commit([create("/items/next")], 30)
    assert client.get_children("/items") == ["next"]


def test_closing_a_writer_does_not_wait_for_a_commit_without_answer(
    zookeeper: ZooKeeperServer, hosts: str
) -> None:
    with Proxy(zookeeper.port) as proxy:
        session = Session(f"127.0.0.1:{proxy.port}/{hosts.partition('/')[2]}", timeout_s=30)
        writer = IdempotentWriter(session, JOURNALS)
        writer.commit([check("/")], 30)
        proxy.swallow, proxy.swallows_left = JOURNALS.encode(), 1
        ended: list[Exception] = []

        def commit() -> None:
            try:
                writer.commit([check("/")], 60)
            except ZooKeeperUnreachable as error:
                ended.append(error)

        committing = threading.Thread(target=commit)
        committing.start()
        wait_until(lambda: proxy.swallowed == 1)
        writer.close(0.01)
        assert committing.is_alive()
        # The commit ends with the session, and opens no other one.
        session.close()
        committing.join(30)
        assert len(ended) == 1
        assert session.state is SessionState.CLOSED


#: Age in milliseconds of the crashed writer's node.
AGE_MS = 200


@pytest.mark.parametrize(("abandoned_s", "left"), [(60.0, 2), (AGE_MS / 1000, 1)])
def test_nodes_of_crashed_writers_are_deleted_in_time(
    session: Session, client: Any, abandoned_s: float, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With the short default timeout, an unanswered deletion would be left to the next writer.
    monkeypatch.setattr(journal_module, "CLEANUP_S", 30.0)
    crashed = IdempotentWriter(session, JOURNALS)
    crashed.commit([check("/items")], 30)
    born = client.exists(f"{JOURNALS}/{client.get_children(JOURNALS)[0]}").mtime
    # The age is measured by the clock of the server. If the limit were read in milliseconds, it would be a
    # thousandth of this age.
    wait_until(lambda: client.set("/items", b"").mtime > born + AGE_MS)
    IdempotentWriter(session, JOURNALS, abandoned_s=abandoned_s).commit([check("/items")], 30)
    assert len(client.get_children(JOURNALS)) == left
    # The writer was not dead: it can commit again.
    crashed.commit([check("/items")], 30)


def test_the_node_of_a_crashed_writer_is_found_among_many(
    session: Session, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "CLEANUP_S", 30.0)
    monkeypatch.setattr(journal_module, "LOOKED_AT", 12)
    for number in range(16):
        client.create(f"{JOURNALS}/{number}", makepath=True)
    # The server returns the names in an order of its own. The crashed writer's node is the last one.
    *others, crashed = [f"{JOURNALS}/{name}" for name in client.get_children(JOURNALS)]
    born = client.exists(crashed).mtime
    wait_until(lambda: client.set("/items", b"").mtime > born + 1000)
    for _ in range(10):
        for path in others:
            client.set(path, b"")
        writer = IdempotentWriter(session, JOURNALS, abandoned_s=1.0)
        writer.commit([check("/items")], 30)
        writer.close()
    assert client.exists(crashed) is None


def test_a_writer_that_has_written_lately_is_not_taken_for_crashed(
    session: Session, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "CLEANUP_S", 30.0)
    writer = IdempotentWriter(session, JOURNALS)
    writer.commit([check("/items")], 30)
    (name,) = client.get_children(JOURNALS)
    path = f"{JOURNALS}/{name}"
    born = client.exists(path).ctime
    wait_until(lambda: client.set("/items", b"").mtime > born + 2000)

    def was_quick() -> bool:
        # If the machine was stopped between the writes, the other writer deletes the node rightly.
        writer.commit([check("/items")], 30)
        written = client.exists(path).mtime
        other = IdempotentWriter(session, JOURNALS, abandoned_s=2.0)
        other.commit([check("/items")], 30)
        quick = bool(client.set("/items", b"").mtime < written + 2000)
        assert not quick or client.exists(path) is not None
        other.close()
        return quick

    assert wait_until(was_quick)
    # The guides promise one day.
    assert journal_module.ABANDONED_S == 24 * 60 * 60
