"""The history of a queue: its samples in Redis, the points between them, and the plots of the page."""

from __future__ import annotations

import json
import math
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
import redis

from celery_dq.app.api.history import HistoryPoint, HistorySample, history_points
from celery_dq.contrib.django.dashboard.history import Sampler, plots
from celery_dq.contrib.django.templatetags.celery_dq_pages import plotted
from celery_dq.inspector.queue_counters import WAIT_BOUNDS_S
from celery_dq.keys import history_stream
from celery_dq.testing.waiting import wait_until
from tests.doubles.thread_limit import no_more_threads
from tests.integration.shop import claim, send

NOON = datetime(2026, 3, 1, 12, 0, tzinfo=timezone.utc)


def sample(at_s: int, published: int, claimed: int, *, bucket: int = 0) -> HistorySample:
    """Return a sample; all messages were claimed within the time of one bucket."""
    buckets = tuple(claimed if number == bucket else 0 for number in range(len(WAIT_BOUNDS_S)))
    return HistorySample(at_s * 1000, 7, 1.5, published, claimed, claimed, buckets)


def test_points_are_the_differences_of_samples() -> None:
    samples = [
        sample(at_s, published, claimed, bucket=3)
        for at_s, published, claimed in ((0, 0, 0), (10, 50, 20), (40, 50, 20))
    ]
    first, second = history_points(samples)
    assert (first.published_per_s, first.claimed_per_s, first.finished_per_s) == (5, 2, 2)
    assert (first.waiting, first.oldest_s, first.p50_s, first.p99_s) == (7, 1.5, 0.1, 0.1)
    # Nothing was claimed: the queue stalls, and only its age tells so.
    assert (second.claimed_per_s, second.p50_s, second.oldest_s) == (0, None, 1.5)


def test_counters_that_began_again_give_no_point() -> None:
    assert history_points([sample(0, 50, 20), sample(10, 3, 1), sample(20, 13, 1)])[0].published_per_s == 1
    assert len(history_points([sample(0, 50, 20), sample(10, 3, 1), sample(20, 13, 1)])) == 1
    assert history_points([sample(5, 1, 1)]) == []
    packed = sample(0, 50, 20).pack()
    assert HistorySample.unpack(0, packed) == sample(0, 50, 20)
    assert HistorySample.unpack(0, "?") is None
    assert HistorySample.unpack(0, "[1,2,3,4,5,[1]]") is None


def test_a_queue_is_sampled_after_the_thread_could_not_start(shop: Any, redis_url: str) -> None:
    send(shop, "a")
    sampler = Sampler()
    with no_more_threads(), pytest.raises(RuntimeError):
        sampler.watch(shop.dq, "push")
    sampler.watch(shop.dq, "push")
    with redis.Redis.from_url(redis_url) as client:
        wait_until(lambda: client.xlen(history_stream("online", "push")), 10)
    sampler.stop()


def test_a_look_at_the_page_begins_the_samples(shop: Any, operator: Any, redis_url: str) -> None:
    send(shop, "a", "b")
    key = history_stream("online", "push")
    with redis.Redis.from_url(redis_url) as client:
        assert client.xlen(key) == 0
        page = operator.get("/dq/queue/?queue=push").content.decode()
        assert "begin half a minute after the first look" in page
        wait_until(lambda: client.xlen(key) == 1, 30)
        # The same 15 seconds get one sample only.
        first = int(client.xrange(key)[0][0].split(b"-")[0])
        (seconds, _) = client.time()
        if seconds * 1000 // 15_000 == first // 15_000:
            assert shop.dq.history.sample("push") is False
        old = {b"s": client.xrange(key)[0][1][b"s"]}
        client.delete(key)
        client.xadd(key, old, id=f"{first - 30_000}-0")
        claim(shop, want=2)
        assert shop.dq.history.sample("push") is True
        assert 0 < client.pttl(key) <= 4_000_000
        client.xadd(key, {b"x": b"?"})
    (point,) = shop.dq.history("push")
    assert 0 < point.claimed_per_s <= 0.07
    assert point.published_per_s == 0
    operator.post("/dq/tenant/resume/", {"queue": "push", "tenant": "a"})
    data = json.loads(operator.get("/dq/queue/?queue=push&format=json").content)
    assert data["history"][0]["claimed_per_s"] == point.claimed_per_s


def test_a_queue_that_does_not_exist_is_not_sampled(shop: Any, operator: Any, redis_url: str) -> None:
    operator.get("/dq/queue/?queue=nowhere")
    send(shop, "a")
    operator.get("/dq/queue/?queue=push")
    with redis.Redis.from_url(redis_url) as client:
        wait_until(lambda: client.exists(history_stream("online", "push")), 30)
        assert not client.exists(history_stream("online", "nowhere"))


def points(*rates: float | None, step: timedelta = timedelta(seconds=15)) -> list[HistoryPoint]:
    """Return points with a rate each; None leaves one out."""
    begin = NOON - step * (len(rates) - 1)
    return [
        HistoryPoint(begin + step * number, 3, None, rate, rate, rate, 0.1, 2.0, math.inf)
        for number, rate in enumerate(rates)
        if rate is not None
    ]


def test_a_plot_has_its_axes_and_a_line_without_the_gaps() -> None:
    assert plots(points(1.0), NOON) == []
    rates, waits, counts = plots(points(1, 4, 0, None, 2, step=timedelta(minutes=2)), NOON)
    assert [level for level, _ in rates.levels] == [0, 2.5, 5]
    assert [label for label, _ in rates.times] == ["11:00", "11:15", "11:30", "11:45", "12:00"]
    # Four minutes without a sample are not a line.
    assert rates.lines[0].path.count("M") == 2
    assert rates.lines[0].path.split("M")[-1] == "382.0 81.2"
    assert rates.lines[0].latest == 2
    assert [line.label for line in waits.lines] == ["50 %", "95 %", "99 %", "oldest that waits"]
    assert waits.lines[3].path == ""
    # The longest waits are at the top.
    assert waits.lines[2].path.split("M")[-1] == "382.0 8.0"
    assert counts.lines[0].latest == 3


def test_an_old_sample_is_not_shown_as_the_present() -> None:
    (rates, *_) = plots(points(1, 2, 3), NOON + timedelta(minutes=30))
    assert [label for label, _ in rates.times][-1] == "12:30"
    assert rates.lines[0].latest is None
    assert rates.lines[0].path
    assert plots(points(1, 2, 3), NOON + timedelta(hours=1, minutes=5)) == []
    # Without a time, the plots end now.
    assert plots(points(1, 2, 3)) == []


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (None, "rate", "–"),
        (12.4, "rate", "12/s"),
        (0.25, "rate", "0.25/s"),
        (0.001, "wait", "1\u202fms"),
        (math.inf, "wait", "over 1 h"),
        (4000, "count", "4\u202f000"),
        (2.5, "count", "2.5"),
    ],
)
def test_values_of_plots_are_short(value: float | None, unit: str, text: str) -> None:
    assert plotted(value, unit) == text


FINE = [7, 1.5, 50, 20, 20, [0] * len(WAIT_BOUNDS_S)]
ODD: tuple[Any, ...] = ("x", None, True, [1], {}, -1, 1e308, math.inf, math.nan, 10**400)
#: One field of a sample, and what another program may have written there.
FOREIGN: list[tuple[int, Any]] = [
    (place, value) for place in range(6) for value in ODD if (place, value) != (1, None)
] + [(5, [value] * len(WAIT_BOUNDS_S)) for value in ODD]


@pytest.mark.parametrize("at_s", [1, 10**9, 4 * 10**9, 2 * 10**11, 2**64 // 1000 - 1])
def test_a_stream_that_another_program_wrote_stops_no_page(
    shop: Any, operator: Any, redis_url: str, at_s: int
) -> None:
    send(shop, "a")
    now_ms = round(datetime.now(timezone.utc).timestamp() * 1000)
    with redis.Redis.from_url(redis_url) as client:
        key = history_stream("online", "push")
        rows = []
        for place, value in FOREIGN:
            fields = [*FINE]
            fields[place] = value
            rows += [json.dumps(FINE), json.dumps(fields)]
        for number, row in enumerate([*rows, json.dumps(FINE), "?", "[]", "{}"]):
            recent = now_ms - 1_000_000 + number * 1000
            client.xadd(key, {"s": row}, id=f"{recent if at_s == 1 else at_s * 1000}-{number + 1}")
        client.xadd(key, {"other": "x"})
    for point in shop.dq.history("push"):
        assert math.isfinite(point.published_per_s)
    for page in ("/dq/", "/dq/queue/?queue=push"):
        answer = operator.get(page)
        assert answer.status_code == 200, page
        assert "nan" not in answer.content.decode().lower().split("<svg", 1)[-1].split("</svg>", 1)[0]
    # A stream that would take no sample of ours begins again.
    shop.dq.history.sample("push")
    with redis.Redis.from_url(redis_url) as client:
        (latest, _), *_ = client.xrevrange(history_stream("online", "push"), count=1)
    assert int(latest.partition(b"-")[0]) < now_ms + 600_000
