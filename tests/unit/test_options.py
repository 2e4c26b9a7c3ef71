from __future__ import annotations

import dataclasses
import pickle
from datetime import timedelta
from typing import Any

import pytest
from celery import Celery

from celery_dq.errors import ConfigurationError
from celery_dq.options import Options, Quota, resolve
from celery_dq.options.sections import SETTINGS, STRICT_HEAD_START_US, BufferOptions, MetricsOptions


def test_without_settings_everything_has_its_default() -> None:
    options = resolve({})
    assert options == Options()
    assert options.lease_us == 15_000_000
    assert options.claim_ahead_us == 50_000
    assert options.queue("any").head_start_us == STRICT_HEAD_START_US
    assert options.queue("any").max_deliveries == 5
    assert options.queue("any").quota == Quota()


def test_every_setting_is_read() -> None:
    options = resolve(
        {
            "broker_url": "redis://",
            "dq_environment": "sandbox",
            "dq_key_prefix": "shop:",
            "dq_lease": timedelta(seconds=20),
            "dq_max_deliveries": 3,
            "dq_priority_aging": "1m",
            "dq_queues": {
                "push": {"rate": "50/s", "when_full": "wait", "priority_aging": None, "partitions": 64},
                "mail": {"max_deliveries": 9, "max_waiting": None},
            },
            "dq_default_quota": {"rate": 5, "burst": 2, "concurrency": 4, "max_waiting": 1_000},
            "dq_inherit_tenant": True,
            "dq_dead_letter_failures": True,
            "dq_dead_letter_retention": "30d",
            "dq_dead_letter_limit": 1_000,
            "dq_confirm_replicas": 1,
            "dq_watchdog": 0,
            "dq_claim_ahead": 0,
            "dq_allow_eviction": True,
            "dq_producer_marker_ttl": "2h",
            "dq_tombstone_ttl": "1d",
            "dq_buffer": True,
            "dq_buffer_folder": "/var/lib/shop",
            "dq_buffer_in_workers": True,
            "dq_buffer_linger": 0,
            "dq_buffer_batch_size": 100,
            "dq_buffer_max_messages": 10,
            "dq_buffer_max_bytes": 100_000,
            "dq_buffer_max_spill_bytes": 5_000_000,
            "dq_buffer_max_block": "2s",
            "dq_buffer_sync_every": 1,
            "dq_buffer_sync_interval": "1s",
            "dq_buffer_close_timeout": 3,
            "dq_metrics_port": 9540,
            "dq_otel": True,
            "dq_metrics_host": "0.0.0.0",
            "dq_metrics_tenants": 20,
            "dq_metrics_timeout": "2s",
        }
    )
    assert options.metrics == MetricsOptions(9540, "0.0.0.0", 20, 2_000_000)
    assert options.environment == "sandbox"
    assert options.key_prefix == "shop:"
    assert options.lease_us == 20_000_000
    assert options.otel is True
    assert options.inherit_tenant is True
    assert options.dead_letter_failures is True
    assert options.confirm_replicas == 1
    assert options.watchdog_us == 0
    assert options.claim_ahead_us == 0
    assert options.allow_eviction is True
    assert options.producer_marker_ttl_us == 7_200_000_000
    assert options.tombstone_ttl_us == 86_400_000_000
    assert (options.dead_letter_retention_us, options.dead_letter_limit) == (30 * 86_400_000_000, 1_000)
    assert options.buffer == BufferOptions(
        enabled=True,
        folder="/var/lib/shop",
        in_workers=True,
        linger_us=0,
        batch_size=100,
        max_messages=10,
        max_bytes=100_000,
        max_spill_bytes=5_000_000,
        max_block_us=2_000_000,
        sync_every=1,
        sync_interval_us=1_000_000,
        close_timeout_us=3_000_000,
    )
    push, mail, other = options.queue("push"), options.queue("mail"), options.queue("other")
    assert push.quota == Quota(rate=50, burst=2, concurrency=4, max_waiting=1_000, when_full="wait")
    assert mail.quota == Quota(rate=5, burst=2, concurrency=4)
    assert (push.head_start_us, push.max_deliveries) == (STRICT_HEAD_START_US, 3)
    assert (mail.head_start_us, mail.max_deliveries) == (60_000_000, 9)
    assert (push.partitions, mail.partitions) == (64, 1)
    assert other == options.defaults
    assert other.quota == Quota(rate=5, burst=2, concurrency=4, max_waiting=1_000)


@pytest.mark.parametrize(
    ("conf", "reported"),
    [
        ({"dq_queues": {"a": {"partitions": 0}}}, "dq_queues['a']['partitions'] = 0 is too small: give 1 or"),
        ({"dq_queues": {"a": {"partitions": 4097}}}, "['partitions'] = 4097 is too large: give 4096 or less"),
        (
            {"dq_queues": {"a": {"partitions": "4"}}},
            "['partitions'] = '4' is not a whole number; from 1 to",
        ),
        ({"dq_partitions": 4}, "there is no setting 'dq_partitions'"),
        (
            {"dq_queues": {"a": {"partitions": 2}}, "dq_singleton_queues": ["a"]},
            "dq_queues['a']['partitions'] = 2, but dq_singleton_queues names the queue: one leader consumes",
        ),
        ({"dq_laese": 3}, "there is no setting 'dq_laese'; did you mean 'dq_lease'?"),
        (
            {"dq_xyzzy": 3},
            "there is no setting 'dq_xyzzy'; known are dq_allocation, dq_allocation_join_delay, ",
        ),
        ({"dq_lease": "soon"}, "dq_lease = 'soon' is not a duration"),
        ({"dq_lease": None}, "dq_lease = None is not a duration"),
        ({"dq_lease": "15"}, "is a text without a unit; from 1s to 1h"),
        ({"dq_lease": 10**400}, "is not a duration"),
        ({"dq_lease": 0.5}, "dq_lease = 0.5 is too small: give 1s or more, 1h at most"),
        ({"dq_lease": "2h"}, "dq_lease = '2h' is too large: give 1h or less, 1s at least"),
        ({"dq_environment": "onlin"}, "'onlin' is not 'online' or 'sandbox'; did you mean 'online'?"),
        ({"dq_environment": 3}, "dq_environment = 3 is not a text"),
        ({"dq_max_deliveries": 0}, "dq_max_deliveries = 0 is too small: give 1 or more"),
        ({"dq_max_deliveries": 2.0}, "dq_max_deliveries = 2.0 is not a whole number; from 1 to 1000000"),
        ({"dq_max_deliveries": True}, "dq_max_deliveries = True is not a whole number"),
        ({"dq_inherit_tenant": {"priority": True}}, "is not True or False"),
        ({"dq_allow_eviction": "no"}, "dq_allow_eviction = 'no' is not True or False"),
        ({"dq_watchdog": 1}, "dq_watchdog = 1 is too small: give 5s or more, or 0 for off"),
        *(
            ({"dq_dedup_url": url}, f"dq_dedup_url = {url!r} names no Redis: give redis://host/db, rediss://")
            for url in ("foo", "amqp://localhost", "http://x", "redis:", "dq-sentinel://localhost/0")
        ),
        *(
            ({"dq_dedup_url": f"dq-{url}"}, f"dq_dedup_url = 'dq-{url}' is the URL of a broker: give {url!r}")
            for url in ("redis://localhost/5", "rediss://localhost/5")
        ),
        ({"dq_dedup_url": "dq-redis://shop:pa@ss@redis/5"}, "give 'redis://**@redis/5'"),
        ({"dq_election": "amqp://shop:pass@mq/"}, "dq_election = 'amqp://**@mq/' names no election"),
        ({"dq_key_prefix": "a{b}"}, "dq_key_prefix = 'a{b}' holds a brace"),
        ({"dq_key_prefix": "a\n"}, "control character"),
        ({"dq_queues": ["push"]}, "dq_queues = ['push'] is not a dict"),
        ({"dq_queues": {"push": 5}}, "dq_queues['push'] = 5 is not a dict"),
        ({"dq_queues": {"": {}}}, "dq_queues: '' is not the name of a queue"),
        ({"dq_queues": {3: {}}}, "dq_queues: 3 is not the name of a queue"),
        (
            {"dq_queues": {"push": {"brust": 5}}},
            "dq_queues['push']: there is no option 'brust'; did you",
        ),
        ({"dq_queues": {"push": {"rate": 5, "burst": 0.5}}}, "dq_queues['push']: burst = 0.5 is not from 1"),
        ({"dq_queues": {"push": {"burst": 5}}}, "dq_queues['push']: burst = 5 has no effect without a rate"),
        (
            {"dq_queues": {"push": {"max_deliveries": 0}}},
            "dq_queues['push']['max_deliveries'] = 0 is too",
        ),
        (
            {"dq_queues": {"push": {"priority_aging": 0}}},
            "dq_queues['push']['priority_aging'] = 0 is too",
        ),
        (
            {"dq_queues": {"push": {"when_full": "wait"}}},
            "dq_queues['push']: when_full = 'wait' has no effect without max_waiting: set max_waiting, too",
        ),
        (
            {"dq_queues": {"push": {"max_waiting": 5, "when_full": "drop"}}},
            "dq_queues['push']: when_full = 'drop' is not one of refuse, wait, discard, dead_letter",
        ),
        (
            {"dq_queues": {"push": {"max_length": 5}}},
            "dq_queues['push']: there is no option 'max_length'",
        ),
        ({"dq_default_quota": {"max_waiting": 0}}, "dq_default_quota: max_waiting = 0 is not from 1"),
        ({"dq_default_quota": {"rate": "x"}}, "dq_default_quota: rate = 'x' is not a rate"),
        (
            {"dq_default_quota": {"max_deliveries": 5}},
            "dq_default_quota: there is no option 'max_deliv",
        ),
        ({"dq_claim_ahead": "5s", "dq_lease": "5s"}, "dq_claim_ahead = 5s is more than 0.6 of dq_lease = 5s"),
        ({"dq_watchdog": 5}, "dq_watchdog = 5s is shorter than dq_lease = 15s"),
        ({"dq_buffer": True}, "dq_buffer = True needs dq_buffer_folder"),
        ({"dq_buffer_sync_every": 1}, "dq_buffer_sync_every = 1 has no effect without dq_buffer_folder"),
        (
            {"dq_metrics_port": 70_000},
            "dq_metrics_port = 70000 is too large: give 65535 or less, 1 at least",
        ),
        (
            {"dq_metrics_tenants": 201},
            "dq_metrics_tenants = 201 is too large: give 200 or less, 0 at least",
        ),
        ({"dq_metrics_timeout": 0}, "dq_metrics_timeout = 0 is too small: give 100ms or more"),
        ({"dq_buffer_batch_size": 1001}, "dq_buffer_batch_size = 1001 is too large: give 1000 or less"),
        (
            {"dq_producer_marker_ttl": "1m", "dq_lease": "2m"},
            "dq_producer_marker_ttl = 1m is shorter than dq_lease = 2m",
        ),
    ],
)
def test_a_wrong_setting_is_refused_with_a_remedy(conf: dict[str, Any], reported: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        resolve(conf)
    assert reported in str(caught.value)


def test_a_long_lease_lengthens_the_default_watchdog() -> None:
    assert resolve({"dq_lease": "10m"}).watchdog_us == 600_000_000


@pytest.mark.parametrize(
    ("enabled", "allocated", "partitions", "expected"),
    [
        (True, None, 1, False),
        (True, None, 2, True),
        (True, True, 1, True),
        (True, True, 2, True),
        (True, False, 1, False),
        (True, False, 2, False),
        (False, None, 2, False),
        (False, False, 2, False),
    ],
)
def test_a_queue_with_several_partitions_is_allocated_by_default(
    enabled: bool, allocated: bool | None, partitions: int, expected: bool
) -> None:
    section = {} if allocated is None else {"allocated": allocated}
    conf = {
        "dq_allocation": enabled,
        "dq_election": "zookeeper://localhost:2181",
        "dq_queues": {"push": {"partitions": 8, **section}},
    }
    assert resolve(conf).is_allocated("push", partitions) is expected


def test_the_settings_of_an_app_are_read_and_left_alone() -> None:
    app = Celery("shop")
    app.conf.update(dq_lease=30)
    before = dict(app.conf)
    assert resolve(app.conf).lease_us == 30_000_000
    assert dict(app.conf) == before


def test_a_namespace_as_in_django_is_understood() -> None:
    class Settings:
        CELERY_BROKER_URL = "redis://"
        CELERY_DQ_LEASE = "20s"
        DQ_OTHER = "not a setting of Celery"

    app = Celery("shop")
    app.config_from_object(Settings, namespace="CELERY")
    assert resolve(app.conf).lease_us == 20_000_000


def test_a_wrong_name_under_a_namespace_is_refused() -> None:
    class Settings:
        CELERY_DQ_LAESE = "20s"

    app = Celery("shop")
    app.config_from_object(Settings, namespace="CELERY")
    with pytest.raises(ConfigurationError, match="did you mean 'dq_lease'"):
        resolve(app.conf)


def test_options_are_immutable_values() -> None:
    options = resolve({"dq_queues": {"push": {"rate": 5}}})
    assert pickle.loads(pickle.dumps(options)) == options
    assert hash(options) == hash(pickle.loads(pickle.dumps(options)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.lease_us = 3  # type: ignore[misc]  # frozen


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_every_setting_has_a_description_and_accepts_its_own_default(setting: Any) -> None:
    assert setting.meaning.endswith(".")
    shown = f"{setting.default}us" if setting.kind.name == "DURATION" and setting.default else setting.default
    assert setting.check(shown) == setting.default


def test_the_databases_of_the_outbox_are_named_in_one_text() -> None:
    assert resolve({}).outbox.databases == ()
    assert resolve({"dq_outbox": "default, billing,"}).outbox.databases == ("default", "billing")
    with pytest.raises(ConfigurationError, match="dq_outbox = True is not a text"):
        resolve({"dq_outbox": True})
