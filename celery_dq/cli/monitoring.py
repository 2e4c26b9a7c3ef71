"""``celery dq exporter``, ``alive``, ``ready`` and ``web``: metrics, probes of a worker, the dashboard."""

from __future__ import annotations

import signal
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from celery_dq.app.api.api import DQ
from celery_dq.cli.arguments import ABOVE_0, seconds_option
from celery_dq.cli.bulk import counted
from celery_dq.cli.output import command, show
from celery_dq.errors import ConfigurationError, MissingLibrary
from celery_dq.probe import WITHIN_S, Question, ask_probe

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


_FILE = click.argument("file", required=False, type=click.Path(path_type=Path))
_WITHIN = seconds_option("--within", WITHIN_S, "Seconds for which the main loop may be silent.", ABOVE_0)


@click.command()
@_FILE
@_WITHIN
@command
def alive(dq: DQ, as_json: bool, file: Path | None, within: float) -> None:
    """Say whether the worker that keeps FILE (default: dq_probe_file) turns its main loop, connects or stops.

    Asks neither broker nor worker. python -m celery_dq.probe alive FILE does the same without the app.

    Exit status 1: it does not.
    """
    _ask("alive", dq, as_json, file, within)


@click.command()
@_FILE
@_WITHIN
@command
def ready(dq: DQ, as_json: bool, file: Path | None, within: float) -> None:
    """Say whether the worker that keeps FILE (default: dq_probe_file) consumes, and its broker answers.

    Asks neither broker nor worker. python -m celery_dq.probe ready FILE does the same without the app.

    Exit status 1: it does not.
    """
    _ask("ready", dq, as_json, file, within)


def _ask(question: Question, dq: DQ, as_json: bool, file: Path | None, within_s: float) -> None:
    setting = dq.options.probe_file
    if file is None and (not setting or "%" in setting):
        raise ConfigurationError(
            f"dq_probe_file = {setting!r} names no single file: give FILE, or set dq_probe_file"
        )
    answer = ask_probe(question, file or Path(setting), within_s=within_s)
    show(as_json, answer, answer.reason)
    if not answer.ok:
        raise SystemExit(1)


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port", default=8765, show_default=True, type=click.IntRange(0, 65535), help="Port; 0 is a free one."
)
@click.option(
    "--read-only/--allow-changes",
    default=True,
    show_default=True,
    help="Whether to refuse every change (405), or to let every user change everything.",
)
@click.option(
    "--auth",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File with one user:hash per line, which only its owner may read; --hash makes a line.",
)
@click.option(
    "--hash",
    "new_user",
    metavar="USER",
    help="Ask for a password, print USER and its hash for --auth, and end.",
)
@click.option(
    "--origin",
    metavar="URL",
    help="Address that browsers use, when a server with TLS passes their requests on: https://dash.example, "
    "or https://example.com/dq below a path of it.",
)
@command
def web(
    dq: DQ,
    as_json: bool,
    host: str,
    port: int,
    read_only: bool,
    auth: Path | None,
    new_user: str | None,
    origin: str | None,
) -> None:
    """Serve the dashboard of the queues. Needs the extra 'web'.

    By default only this machine reaches it, any user of the machine included, and nothing can be changed.
    Another --host and --origin need --auth. Put a server with TLS before it, because passwords travel
    unencrypted.
    """
    try:
        # Both imports are slow, and need the extra 'web'.
        import waitress  # noqa: F401

        from celery_dq.contrib.django.dashboard import standalone
    except ImportError as exc:
        library = "waitress" if find_spec("django") else "Django"
        raise MissingLibrary.needed_by("celery dq web", library, "web") from exc
    if new_user is not None:
        if not standalone.is_user(new_user):
            raise ConfigurationError(
                f"--hash {new_user!r}: give the name of a user, without ':', line ends, or '#' at its start"
            )
        password = click.prompt("Password", hide_input=True, confirmation_prompt=True, err=True)
        line = f"{new_user}:{standalone.hash_password(password)}"
        show(as_json, {"line": line}, line)
        return
    if auth is None and not standalone.is_loopback(host):
        raise ConfigurationError(
            f"--host {host}: other machines could reach it; give --auth FILE, with user:hash lines"
        )
    if auth is None and origin and not standalone.is_loopback(standalone.host_of(origin)):
        raise ConfigurationError(
            f"--origin {origin}: others could reach it by that server; give --auth FILE, with user:hash lines"
        )
    passwords = {} if auth is None else standalone.read_passwords(auth)
    app = click.get_current_context().obj.app
    wsgi = standalone.application(app, host=host, changes=not read_only, passwords=passwords, origin=origin)

    def ready(url: str) -> None:
        rights = "read-only" if read_only else "changes are allowed"
        users = counted(len(passwords), "user") if passwords else "no password"
        show(as_json, {"url": url}, f"Dashboard of {dq.options.environment!r} at {url} ({rights}, {users})")

    # A plain `kill` ends the server like Ctrl-C, after which it finishes its requests and returns.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    standalone.serve(wsgi, host, port, ready)
    click.echo("Stopped.", err=True)
