"""One suite for every coordinator: each behaves as the machine does."""

from __future__ import annotations

import threading
import time

from celery_dq.dedup.machine import Coordinator, DedupResult, HeldDedupLock, Verdict
from celery_dq.testing.waiting import wait_until

KEY = 'shop.refresh(sku="ä*{}")'


def test_accept_block_decline(coordinator: Coordinator) -> None:
    head = coordinator.enqueue(KEY, "a")
    assert head.verdict is Verdict.ACCEPT
    assert head.token > 0
    assert coordinator.enqueue(KEY, "b")[:3] == (Verdict.BLOCK, "a", 0)
    assert coordinator.enqueue(KEY, "c")[:3] == (Verdict.DECLINE, "b", 0)
    assert coordinator.start(KEY, "b") == 0
    assert coordinator.start(KEY, "c") is None
    assert coordinator.finish(KEY, "a", head.token)
    token = coordinator.start(KEY, "b")
    assert token is not None
    assert token > head.token
    assert coordinator.finish(KEY, "b", token)
    assert coordinator.inspect(KEY) is None
    assert coordinator.keys() == []


def test_a_redelivery_of_a_waiting_call_takes_its_place(coordinator: Coordinator) -> None:
    head = coordinator.enqueue(KEY, "t/1", task="t")
    coordinator.enqueue(KEY, "u/1", task="u")
    # Its first worker may be dead. A declined delivery would then never run.
    assert coordinator.enqueue(KEY, "u/2", task="u") == DedupResult(Verdict.BLOCK, "t/1", 0, "u/1")
    assert coordinator.enqueue(KEY, "t/2", task="t")[:2] == (Verdict.ACCEPT, "t/2")
    assert coordinator.enqueue(KEY, "t/3", task="t") == DedupResult(Verdict.ACCEPT, "t/3", 0, "t/2")
    assert coordinator.start(KEY, "u/1") is None
    assert coordinator.finish(KEY, "t/1", head.token)
    assert coordinator.start(KEY, "t/2") is None
    token = coordinator.start(KEY, "t/3")
    assert token
    assert coordinator.finish(KEY, "t/3", token)
    assert coordinator.start(KEY, "u/2")


def test_a_void_token_of_a_call_that_runs_again_ends_nothing(coordinator: Coordinator) -> None:
    void = coordinator.enqueue(KEY, "a").token
    assert coordinator.release(KEY, "a", void)
    token = coordinator.start(KEY, "a") or 0
    assert token > void
    assert not coordinator.finish(KEY, "a", void)
    assert not coordinator.release(KEY, "a", void)
    assert not coordinator.withdraw(KEY, "a")
    assert coordinator.renew([HeldDedupLock(KEY, "a", void), HeldDedupLock(KEY, "a", token)]) == [False, True]
    assert coordinator.finish(KEY, "a", token)


def test_freed_by_an_operator(coordinator: Coordinator) -> None:
    head = coordinator.enqueue(KEY, "a")
    coordinator.enqueue(KEY, "b")
    was = coordinator.free(KEY)
    assert was is not None
    assert was.head is not None
    assert was.tail is not None
    assert (was.head.call, was.head.token, was.tail.call) == ("a", head.token, "b")
    assert coordinator.start(KEY, "b") is None
    assert not coordinator.finish(KEY, "a", head.token)
    assert coordinator.enqueue(KEY, "c").token > head.token
    assert coordinator.free("nothing") is None


def test_a_look(coordinator: Coordinator) -> None:
    coordinator.enqueue(KEY, "t/1", task="t")
    coordinator.enqueue(KEY, "u/1", task="u")
    coordinator.enqueue(KEY, "t/2", task="t")
    seen = coordinator.inspect(KEY)
    assert seen is not None
    assert seen.head is not None
    assert (seen.key, seen.head.call, seen.heir and seen.heir.call) == (KEY, "t/1", "t/2")
    assert seen.tail is not None
    assert seen.tail.call == "u/1"
    assert 0 <= seen.head.age < 10
    assert seen.head.lease > 0
    assert coordinator.inspect("nothing") is None


def test_threads_on_few_keys(coordinator: Coordinator) -> None:
    """Never two running, never two waiting, and a declined call is covered by a run that began after it."""
    runs: dict[str, list[str]] = {f"k{n}": [] for n in range(2)}
    together = threading.Barrier(8, timeout=20)
    wrong: list[str] = []
    order = threading.Lock()
    begun: dict[str, int] = {}
    asked: list[tuple[str, int]] = []
    tick = iter(range(10**9))

    def work(thread: int) -> None:
        for turn in range(40):
            key, call = f"k{(thread + turn) % 2}", f"{thread}.{turn}"
            together.wait()
            with order:
                at = next(tick)
            result = coordinator.enqueue(key, call)
            token: int | None = result.token
            if result.verdict is Verdict.DECLINE:
                asked.append((result.covering, at))
                continue
            while not token:
                token = coordinator.start(key, call)
                if token is None:
                    wrong.append(f"{call} was lost")
                    break
            if token is None:
                continue
            with order:
                begun[call] = next(tick)
            runs[key].append(call)
            if len(runs[key]) != 1:
                wrong.append(f"{key}: {runs[key]} run together")
            time.sleep(0.0005)  # the work, during which other calls arrive
            runs[key].remove(call)
            if not coordinator.finish(key, call, token):
                wrong.append(f"{call} could not finish")

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert coordinator.keys() == []
    assert asked
    assert all(begun[covering] > at for covering, at in asked)


def test_verdicts_are_counted_by_queue(coordinator: Coordinator) -> None:
    head = coordinator.enqueue("cache|k", "a")
    # A repeated request under the same name is the same call.
    coordinator.enqueue("cache|k", "a")
    coordinator.enqueue("cache|k", "b", policy="replace")
    coordinator.enqueue("cache|k", "c", policy="replace")
    coordinator.enqueue("cache|k", "d")
    coordinator.enqueue("other|k|l", "a")
    assert coordinator.finish("cache|k", "a", head.token)
    token = coordinator.start("cache|k", "c") or 0
    assert token > head.token
    assert coordinator.finish("cache|k", "c", token)
    late = coordinator.enqueue("cache|l", "a", timeout=0.02)
    wait_until(lambda: not coordinator.renew([HeldDedupLock("cache|l", "a", late.token)])[0])
    assert coordinator.verdicts("cache") == {"accept": 2, "block": 2, "decline": 1, "replace": 1, "evict": 1}
    assert coordinator.verdicts("other") == {"accept": 1}
    assert coordinator.verdicts("cac") == {}


def test_keys_by_their_beginning(coordinator: Coordinator) -> None:
    for key in ("cache|a", "cache|b", "cache2|a", "c*|a"):
        coordinator.enqueue(key, "call", timeout=30)
    assert sorted(coordinator.keys("cache|")) == ["cache|a", "cache|b"]
    assert coordinator.keys("c*|") == ["c*|a"]
    assert len(coordinator.keys()) == 4
    now = coordinator.inspect("cache|a")
    assert now is not None
    assert now.head is not None
    assert (now.head.timeout, now.head.followers) == (30, 0)
