"""``celery dq web``: the dashboard without a Django project."""

from __future__ import annotations

import signal
from importlib.util import find_spec
from pathlib import Path

import click

from celery_dq.app.api.api import DQ
from celery_dq.cli.output import command, show
from celery_dq.cli.progress import counted
from celery_dq.errors import ConfigurationError, MissingLibrary


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
