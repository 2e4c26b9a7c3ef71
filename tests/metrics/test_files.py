"""The table of metrics, the alert rules, the dashboard, and the query for KEDA."""

from __future__ import annotations

import json
import re
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from celery_dq.metrics.table import METRICS
from tests.integration.shop import claim, send
from tests.metrics.conftest import MakeApp, Serve, scrape

ROOT = Path(__file__).parents[2]
FILES = ROOT / "celery_dq" / "metrics" / "files"
ALERTS = yaml.safe_load((FILES / "alerts.yml").read_text())
DASHBOARD = json.loads((FILES / "dashboard.json").read_text())
NAME = re.compile(r"\bcelery_[a-z_]+")


def served_names() -> set[str]:
    found = set()
    for metric in METRICS:
        ends = ("_bucket", "_count", "_sum") if metric.kind == "histogram" else ("",)
        found |= {metric.name + end for end in ends}
    return found


def alert_queries() -> dict[str, str]:
    return {rule["alert"]: rule["expr"] for group in ALERTS["groups"] for rule in group["rules"]}


def dashboard_queries() -> Iterator[str]:
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"]
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"]


def keda_trigger() -> dict[str, str]:
    text = (ROOT / "docs" / "guides" / "metrics.rst").read_text()
    block = text.split(":caption: keda.yaml\n", 1)[1].split("\n\n``", 1)[0]
    (trigger,) = yaml.safe_load(block)["spec"]["triggers"]
    metadata: dict[str, str] = trigger["metadata"]
    return metadata


def promtool(*words: str, text: str = "") -> str:
    done = subprocess.run(
        ["promtool", *words], input=text, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_name_in_the_files_is_in_the_table() -> None:
    used = {
        name for query in (*alert_queries().values(), *dashboard_queries()) for name in NAME.findall(query)
    }
    assert used - served_names() == set()
    assert len(used) > 25


def test_the_names_follow_the_rules_of_prometheus() -> None:
    for metric in METRICS:
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert re.fullmatch(r"[a-z]+(_[a-z]+)*", metric.name)
        assert metric.meaning.endswith(".")
        by_label = [value for value, _ in metric.sources if value]
        assert bool(by_label) == (len(metric.sources) > 1 or by_label == ["*"])


def test_promtool_accepts_the_metrics_of_a_scrape(make_app: MakeApp, serve: Serve) -> None:
    app = make_app(dq_metrics_tenants=5)
    send(app, "a", "b")
    claim(app)
    with urllib.request.urlopen(serve(app)) as reply:
        lines = reply.read().decode().splitlines(keepends=True)
    # A gauge should not end in _count; but celery-exporter has named it so.
    text = "".join(line for line in lines if "celery_active_consumer_count" not in line)
    promtool("check", "metrics", text=text)


def test_promtool_accepts_the_rules_and_the_queries_of_the_dashboard(tmp_path: Path) -> None:
    assert "11 rules found" in promtool("check", "rules", str(FILES / "alerts.yml"))
    queries = [
        query.replace("$__rate_interval", "1m").replace("$queue", "push")
        for query in dashboard_queries()
        if not query.startswith("label_values")
    ]
    rules = [{"record": f"panel:{number}", "expr": query} for number, query in enumerate(queries)]
    path = tmp_path / "panels.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    assert f"{len(queries)} rules found" in promtool("check", "rules", str(path))


#: Alert -> series by which it fires after two hours, and by which it does not.
CASES: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "CeleryDQBrokerDown": ({"celery_dq_up": "0x120"}, {"celery_dq_up": "1x120"}),
    "CeleryDQExporterGone": ({"celery_dq_up": "1x60"}, {"celery_dq_up": "0x120"}),
    "CeleryDQElectionsDown": (
        {"celery_dq_up": "1x120", "celery_dq_elections_up": "0x120"},
        {"celery_dq_up": "0x120", "celery_dq_elections_up": "0x120"},
    ),
    "CeleryDQOldMessage": (
        {'celery_dq_queue_oldest_waiting_age_seconds{queue="push"}': "0+60x120"},
        {'celery_dq_queue_oldest_waiting_age_seconds{queue="push"}': "60x120"},
    ),
    "CeleryDQBacklogWithoutConsumer": (
        {
            'celery_dq_queue_runnable_messages{queue="push"}': "1x120",
            'celery_dq_queue_consumers{queue="push"}': "0x120",
        },
        {
            'celery_dq_queue_runnable_messages{queue="push"}': "1x120",
            'celery_dq_queue_consumers{queue="push"}': "1x120",
            'celery_dq_queue_runnable_messages{queue="paused"}': "1x120",
            'celery_dq_queue_consumers{queue="paused"}': "0x120",
            'celery_dq_queue_paused{queue="paused"}': "1x120",
        },
    ),
    "CeleryDQDeadLetters": (
        {'celery_dq_messages_dead_lettered_total{queue="push"}': "0+1x120"},
        {'celery_dq_messages_dead_lettered_total{queue="push"}': "7x120"},
    ),
    "CeleryDQSpillNotSent": (
        {"celery_dq_spill_oldest_age_seconds": "0+60x120"},
        {"celery_dq_spill_oldest_age_seconds": "30x120"},
    ),
    "CeleryDQOutboxNotRelayed": (
        {'celery_dq_outbox_oldest_age_seconds{database="default"}': "0+60x120"},
        {'celery_dq_outbox_oldest_age_seconds{database="default"}': "30x120"},
    ),
    "CeleryDQBreakerOpen": (
        {"celery_dq_breaker_open": "1x120"},
        {"celery_dq_breaker_open": "0x119 1x1"},
    ),
    "CeleryDQLeaderFlaps": (
        # Eight leaders between two scrapes.
        {'celery_dq_leader_token{leadership="ledger"}': "1x115 9x5"},
        {'celery_dq_leader_token{leadership="ledger"}': "1x60 2x60"},
    ),
    "CeleryDQTenantThrottled": (
        {'celery_dq_tenant_throttled{queue="push",tenant="a"}': "1x120"},
        {
            'celery_dq_tenant_throttled{queue="push",tenant="a"}': "0x90 1x30",
            'celery_dq_tenant_throttled{queue="paused",tenant="a"}': "1x120",
            'celery_dq_queue_paused{queue="paused"}': "1x120",
        },
    ),
}


def test_each_alert_fires_for_its_reason_and_not_without(tmp_path: Path) -> None:
    assert CASES.keys() == alert_queries().keys()
    tests = []
    for alert, both in CASES.items():
        for fires, series in zip((True, False), both, strict=True):
            query = f'count(ALERTS{{alertname="{alert}", alertstate="firing"}}) or vector(0)'
            tests.append(
                {
                    "name": f"{alert} {fires}",
                    "interval": "1m",
                    "input_series": [{"series": key, "values": values} for key, values in series.items()],
                    "promql_expr_test": [
                        {
                            "expr": query,
                            "eval_time": "2h",
                            "exp_samples": [{"labels": "{}", "value": int(fires)}],
                        }
                    ],
                }
            )
    path = tmp_path / "alerts_test.yml"
    path.write_text(
        yaml.safe_dump(
            {"rule_files": [str(FILES / "alerts.yml")], "evaluation_interval": "1m", "tests": tests}
        )
    )
    promtool("test", "rules", str(path))


@pytest.fixture
def keda_value(tmp_path: Path, serve: Serve) -> Callable[[Any, int | None], None]:
    """A function that checks the result of the guide's query on what an exporter serves now."""

    def check(app: Any, expected: int | None) -> None:
        def series() -> list[dict[str, str]]:
            return [
                {
                    "series": name
                    + json.dumps(dict(labels)).replace('": "', '="').replace(', "', ", ").replace('{"', "{"),
                    "values": str(value),
                }
                for (name, labels), value in scrape(url).samples.items()
                if name in NAME.findall(keda_trigger()["query"])
            ]

        url = serve(app)
        samples = [] if expected is None else [{"labels": "{}", "value": expected}]
        test = {
            "input_series": series(),
            "promql_expr_test": [
                {"expr": keda_trigger()["query"], "eval_time": "0s", "exp_samples": samples}
            ],
        }
        path = tmp_path / "keda_test.yml"
        path.write_text(yaml.safe_dump({"rule_files": [], "tests": [test]}))
        promtool("test", "rules", str(path))

    return check


def test_throttled_and_paused_tenants_start_no_pods(
    make_app: MakeApp, keda_value: Callable[[Any, int | None], None]
) -> None:
    app = make_app()
    app.dq.quotas.set("push", "slow", rate="1/d", burst=2)
    app.dq.quotas.set("push", "paused", paused=True)
    send(app, *["slow"] * 100, *["paused"] * 50)
    keda_value(app, 2)
    claim(app, 5)
    assert app.dq.queues["push"].snapshot().throttled == 1
    # Both messages run; no further slot is needed.
    keda_value(app, 2)
    send(app, *"abc")
    keda_value(app, 5)


def test_an_empty_queue_needs_no_pod_and_a_dead_broker_is_no_empty_queue(
    make_app: MakeApp, keda_value: Callable[[Any, int | None], None]
) -> None:
    keda_value(make_app(), 0)
    keda_value(make_app("dq-redis://127.0.0.1:1/0"), None)
    assert keda_trigger()["ignoreNullValues"] == "false"


def test_a_queue_without_workers_wakes_them_when_a_message_is_due(
    make_app: MakeApp, keda_value: Callable[[Any, int | None], None]
) -> None:
    app = make_app()
    send(app, "a", "b", countdown=3600)
    keda_value(app, 0)
    with app.dq._broker.open_home("push") as (partition, client):
        due = dict.fromkeys(client.zrange(partition.keys.delayed, 0, -1), 1)
        client.zadd(partition.keys.delayed, due)
    keda_value(app, 1)
