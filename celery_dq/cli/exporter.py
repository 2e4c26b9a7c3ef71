"""``celery dq exporter``: serve metrics for Prometheus."""

from __future__ import annotations

import signal
from importlib.resources import files
from typing import Any

import click

from celery_dq.app.api.api import DQ
from celery_dq.cli.output import command, show
from celery_dq.errors import ConfigurationError, MissingLibrary

#: Option of the command -> the file that it prints.
_FILES = {"alerts": "alerts.yml", "dashboard": "dashboard.json"}


@click.command()
@click.option(
    "--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 is all of them."
)
@click.option(
    "--port", default=9540, show_default=True, type=click.IntRange(0, 65_535), help="Port; 0 is any free one."
)
@click.option("--print-alerts", "printed", flag_value="alerts", help="Print rules for Prometheus, and end.")
@click.option(
    "--print-dashboard", "printed", flag_value="dashboard", help="Print a dashboard for Grafana, and end."
)
@command
def exporter(dq: DQ, as_json: bool, host: str, port: int, printed: str | None) -> None:
    """Serve the metrics of all queues on http://HOST:PORT/metrics, until SIGTERM or Ctrl-C.

    One exporter serves a broker; it asks no worker. The answers to requests follow dq_metrics_timeout and
    dq_metrics_tenants.
    """
    if printed is not None:
        click.echo((files("celery_dq.metrics") / "files" / _FILES[printed]).read_text("utf-8"), nl=False)
        return
    try:
        from celery_dq.metrics.server import MetricsServer
    except ImportError as exc:
        raise MissingLibrary.needed_by("celery dq exporter", "prometheus-client", "metrics") from exc
    try:
        server = MetricsServer(click.get_current_context().obj.app, host, port)
    except OSError as exc:
        raise ConfigurationError(
            f"The exporter cannot listen on {host}:{port} ({exc.strerror or exc}): give another --port, or "
            "an address of this machine as --host"
        ) from exc
    signal.signal(signal.SIGTERM, _stop)
    show(as_json, {"url": server.url}, f"Serving metrics on {server.url}")
    try:
        server.serve()
    except (KeyboardInterrupt, SystemExit):
        show(as_json, {"stopped": True}, "Stopped.")
    finally:
        server.server_close()


def _stop(*_: Any) -> None:
    raise SystemExit(0)
