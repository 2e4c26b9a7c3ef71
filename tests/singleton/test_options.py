from __future__ import annotations

from typing import Any

import pytest
from celery import Celery
from kombu import Queue

from celery_dq.errors import ConfigurationError
from celery_dq.options import resolve
from celery_dq.options.sections import SingletonOptions
from celery_dq.worker.singleton import singleton_queues


@pytest.mark.parametrize("names", [["b", "a"], ("b", "a"), {"a", "b"}, {"a": {}, "b": None}])
def test_queues_may_be_only_named(names: Any) -> None:
    options = resolve({"dq_singleton_queues": names})
    assert options.singletons == (SingletonOptions("a"), SingletonOptions("b"))


def test_every_part_is_read() -> None:
    options = resolve(
        {
            "dq_singleton_queues": {"a": {"hand_over": "abort", "grace": "2s", "career": "shop:Career"}},
            "dq_election": "zookeeper://zoo1:2181,zoo2:2181/shop",
            "dq_election_session": "6s",
            "dq_election_options": {"auth": [("digest", "a:b")]},
            "dq_beat_scheduler": "shop:Scheduler",
            "dq_beat_name": "shop",
        }
    )
    assert options.singletons == (SingletonOptions("a", "abort", 2_000_000, "shop:Career"),)
    assert options.election_session_us == 6_000_000
    assert dict(options.election_options) == {"auth": [("digest", "a:b")]}
    assert (options.beat_scheduler, options.beat_name) == ("shop:Scheduler", "shop")
    hash(options)


@pytest.mark.parametrize(
    ("settings", "reported"),
    [
        ({"dq_singleton_queues": "ledger"}, r"neither a list of the names.*: write \['ledger'\]"),
        ({"dq_singleton_queues": 3}, "neither a list of the names of queues nor a dict of their options$"),
        ({"dq_singleton_queues": [7]}, "not the name of a queue"),
        ({"dq_singleton_queues": {"a": 3}}, r"dq_singleton_queues\['a'\] = 3 is not a dict"),
        ({"dq_singleton_queues": {"a": {"handover": "abort"}}}, "did you mean 'hand_over'"),
        ({"dq_singleton_queues": {"a": {"hand_over": "abrot"}}}, "did you mean 'abort'"),
        ({"dq_election": "etcd://x"}, "names no election"),
        ({"dq_election_options": {"auth": []}}, "has no effect"),
        (
            {"dq_election": "zookeeper://x", "dq_election_options": {"certs": 1}},
            "no option 'certs'",
        ),
    ],
)
def test_options_without_sense_are_refused(settings: dict[str, Any], reported: str) -> None:
    with pytest.raises(ConfigurationError, match=reported):
        resolve(settings)


def test_a_queue_that_is_declared_as_singleton_has_one_partition() -> None:
    app = Celery(set_as_current=False)
    app.conf.task_queues = [Queue("ledger", queue_arguments={"x-single-active-consumer": True})]
    assert set(singleton_queues(app, resolve({}))) == {"ledger"}
    with pytest.raises(ConfigurationError, match="but the queue is declared with x-single"):
        singleton_queues(app, resolve({"dq_queues": {"ledger": {"partitions": 2}}}))
