"""The subcommand that inspects a Curator queue in ZooKeeper."""

from __future__ import annotations

from typing import Any

import click

from celery_dq.app.api.api import DQ
from celery_dq.cli.arguments import ABOVE_0, seconds_option
from celery_dq.cli.bulk import counted
from celery_dq.cli.output import COUNT, command, print_line, show, show_table
from celery_dq.errors import ConfigurationError, DQError, MissingLibrary
from celery_dq.transport.aliases import ZOOKEEPER_SCHEME
from celery_dq.znodes import ROOT

_COLUMNS = ("name", "mark", "items", "size", "put_at", "locked", "problem")


@click.command()
@click.argument("hosts")
@click.argument("path")
@click.option(
    "--kind",
    type=click.Choice(["plain", "id", "priority", "delay", "simple"]),
    default="plain",
    show_default=True,
    help="Kind of the queue, which decides how the names of its nodes are read.",
)
@click.option("--locks", "lock_path", help="Folder of the locks, to show which nodes are being consumed.")
@click.option(
    "--close-nodes",
    is_flag=True,
    help="Take the nodes at PATH and below from clients without credentials, as new nodes are: "
    "those that are older than the credentials in the settings are open to all.",
)
@click.option("--limit", default=50, show_default=True, type=COUNT, help="Nodes to show.")
@seconds_option("--timeout", 10.0, "Seconds to wait for ZooKeeper.", ABOVE_0)
@command
def zookeeper(
    dq: DQ,
    as_json: bool,
    hosts: str,
    path: str,
    kind: str,
    lock_path: str | None,
    close_nodes: bool,
    limit: int,
    timeout: float,
) -> None:
    """Show the next nodes of the ZooKeeper queue at PATH, e.g. "celery dq zookeeper zk:2181/shop /mail".

    A server that broker_url or dq_election names gets the credentials and TLS of these settings.
    """
    try:
        # These modules need the extra 'zookeeper'.
        from celery_dq.curator.browse import look
        from celery_dq.curator.queue import check_path
        from celery_dq.zookeeper import open_nodes
        from celery_dq.zookeeper.session import Session
    except ImportError as exc:
        raise MissingLibrary.needed_by("celery dq zookeeper", "kazoo", "zookeeper") from exc

    if not (close_nodes and path == ROOT):
        check_path("PATH", path)
    if lock_path is not None:
        check_path("--locks", lock_path)
    try:
        session = Session(hosts, **_credentials(dq, hosts))
        try:
            if close_nodes:
                closed = open_nodes.close_nodes(session, path, timeout)
                show(as_json, {"closed": closed}, f"{counted(closed, 'node')} closed.")
                return
            views = look(session, path, kind, lock_path=lock_path, limit=limit, timeout_s=timeout)
        finally:
            session.close()
    except DQError:
        raise
    except ValueError as exc:  # raised by urllib or kazoo
        raise ConfigurationError(f"HOSTS {hosts!r}: {exc}; give host:2181,host:2181/chroot") from exc
    show_table(as_json, views, _COLUMNS, f"No node is in {path!r}.")
    if not as_json:
        for problem, remedy in {view.problem: view.remedy for view in views if view.problem}.items():
            print_line(f"{problem}: {remedy}")


def _credentials(dq: DQ, hosts: str) -> dict[str, Any]:
    """Make the arguments of a session from the settings that name one of the servers."""
    from celery_dq.transport.zookeeper.address import host_list, session_options

    def servers(hosts: str) -> set[str]:
        return {*host_list(hosts.partition("/")[0], None, None).split(",")}

    connection = click.get_current_context().obj.app.connection_for_write()
    if connection.transport_cls == ZOOKEEPER_SCHEME:
        transport = connection.transport
        if servers(transport.session.hosts) & servers(hosts):
            # The transport has moved the user and the password of the URL to its client.
            return session_options(transport.client)
    if servers(dq.options.election.removeprefix("zookeeper://")) & servers(hosts):
        return dict(dq.options.election_options)
    return {}
