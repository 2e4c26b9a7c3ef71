"""The checks of ``celery dq doctor`` that ask the servers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import redis
from kombu.exceptions import OperationalError

from celery_dq.app.api.api import dq_of
from celery_dq.app.api.broker import BrokerAccess
from celery_dq.app.checks.finding import WAIT_FOR_SLOT, Finding, reason_of, slot_moves
from celery_dq.app.checks.settings_checks import uses_dedup
from celery_dq.app.timeouts import connection_with_timeout
from celery_dq.clock import SystemClock
from celery_dq.errors import (
    AccessDenied,
    ConfigurationError,
    MissingLibrary,
    ServerError,
    ZooKeeperUnreachable,
)
from celery_dq.inspector.redis_values import server_time_us
from celery_dq.inspector.tenants import settings_quota
from celery_dq.other_brokers.redis_coordinator import redis_of
from celery_dq.shown import shell_word, shown_url
from celery_dq.singleton.elections import Elections
from celery_dq.transport.redis.store.cluster_client import master_clients
from celery_dq.transport.redis.store.rights import ROLES, denied_commands
from celery_dq.transport.redis.store.rounds import run_rounds
from celery_dq.transport.redis.store.server_checks import (
    UNCHECKED,
    is_cluster_node,
    refuses_login,
    server_info,
)
from celery_dq.znodes import ROOT

#: Seconds within which a server must answer.
PATIENCE_S = 3.0
#: Seconds between the clocks of this machine and of Redis, from which on they are reported.
MOST_OFFSET_S = 1.0
#: Nodes of ZooKeeper at whose rights the doctor looks, the topmost first.
MOST_NODES = 1_000
#: Names of the lists of Celery's Redis transport, for its four priorities.
_STOCK_LISTS = ("{}", "{}\x06\x163", "{}\x06\x166", "{}\x06\x169")
_REFUSALS = (OperationalError, redis.RedisError, ZooKeeperUnreachable, AccessDenied, OSError)


@contextlib.contextmanager
def broker(app: Any, found: list[Finding]) -> Iterator[Any]:
    """Connect to the broker, of any kind, and add failures to `found`.

    Args:
        app: a Celery app.
        found: the list of findings that grows.

    Yields:
        A channel of the tenant broker; None for another broker, and for one that cannot be used.
    """
    context = dq_of(app).context
    with contextlib.ExitStack() as stack:
        channel = None
        try:
            tenant_broker = BrokerAccess(app, context)
            connection = stack.enter_context(connection_with_timeout(app, PATIENCE_S))
            connection.ensure_connection(max_retries=1, interval_start=0, timeout=PATIENCE_S)
            if tenant_broker.serves_queues():
                channel = stack.enter_context(tenant_broker.channel(connection))
            else:
                found.append(Finding("I011", f"The broker {shown_url(connection.as_uri())} can be reached."))
                if tenant_broker.is_zookeeper():
                    found.extend(_open_nodes(connection.transport.session, "broker_url"))
        except ServerError as exc:
            found.append(Finding("E010", str(exc), "Mend the server."))
        except MissingLibrary:
            pass  # check_settings reports it
        except ImportError as exc:
            found.append(Finding("E004", str(exc), "Install it."))
        except _REFUSALS as exc:
            found.append(_unreachable(app, exc))
        try:
            yield channel
        except _REFUSALS as exc:  # a pooled connection may have been lost since
            found.append(_unreachable(app, exc))


def _unreachable(app: Any, exc: Exception) -> Finding:
    if slot_moves(exc):
        return Finding("E011", f"The broker cannot be read: {reason_of(exc)}.", WAIT_FOR_SLOT)
    if refuses_login(exc):
        problem, _, remedy = str(exc).rpartition(": ")
        return Finding("E011", f"{problem}.", f"{remedy.capitalize()}.")
    problem = f"The broker cannot be reached: {reason_of(exc)}."
    remedy = f"Start it, or mend broker_url.{tls_hint(app)}"
    # The libraries raise errors of their own with the text of the ssl module.
    if "certificate" in str(exc).casefold():
        remedy = (
            "Mend broker_use_ssl: it names the trusted authority, and the certificate and key of this client."
        )
    return Finding("E011", problem, remedy)


def tls_hint(app: Any) -> str:
    """Return a sentence about TLS if the URL of the broker asks for it; else ""."""
    scheme = app.connection_for_write().transport_cls
    return f" The port must serve TLS, for which {scheme}:// asks." if scheme.endswith("rediss") else ""


def redis_server(app: Any, channel: Any) -> Iterator[Finding]:
    """Report version, eviction policy and persistence. Connecting has already refused an unfit server."""
    for server, client in _servers(channel):
        yield from _fitness(server[0].upper() + server[1:], client)


def _servers(channel: Any) -> Iterator[tuple[str, Any]]:
    """Yield the server, or each master of a cluster, and a client that asks it."""
    if channel.identity.slots is None:
        yield "the server", channel.client
        return
    for node, client in master_clients(channel.client):
        yield f"the master {node} of the Redis Cluster", client


def _fitness(server: str, client: Any) -> Iterator[Finding]:
    try:
        info = server_info(client, "server", "memory", "persistence", "replication")
    except (redis.ConnectionError, redis.TimeoutError) as exc:
        yield Finding("E011", f"{server} cannot be reached: {reason_of(exc)}.", "Start it.")
        return
    if info is None:
        yield Finding("W013", UNCHECKED)
        return
    policy = info.get("maxmemory_policy", "noeviction")
    yield Finding("I010", f"{server} runs Redis {info.get('redis_version')}, policy {policy}.")
    if not int(info.get("aof_enabled", 0)):
        yield Finding(
            "W012",
            f"{server} keeps no append-only file: what it holds in memory is lost when it dies.",
            "Set appendonly yes on the Redis server.",
        )
    if is_cluster_node(info) and not int(info["connected_slaves"]):
        yield Finding(
            "W031",
            f"{server} has no replica: its partitions stand still while it is away.",
            "Add a replica to the cluster.",
        )


def clock_offset(app: Any, channel: Any) -> Iterator[Finding]:
    """Whether the clocks of this machine and of each Redis server agree."""
    clock = SystemClock()
    for server, client in _servers(channel):
        began = clock.wall()
        try:
            offset_s = (began + clock.wall()) / 2 - server_time_us(client) / 1e6
        except (redis.ConnectionError, redis.TimeoutError):
            continue  # the check of the server reports it
        if abs(offset_s) > MOST_OFFSET_S:
            side = "ahead of" if offset_s > 0 else "behind"
            yield Finding(
                "W027",
                f"The clock of this machine is {abs(offset_s):.1f} s {side} the clock of {server}: an ETA or "
                "an expiry that this machine computes comes by as much too late or too early.",
                "Let NTP set both clocks.",
            )


def replicas(app: Any, channel: Any) -> Iterator[Finding]:
    """Whether enough replicas are connected to each server for ``dq_confirm_replicas``."""
    wanted = dq_of(app).options.confirm_replicas
    if not wanted:
        return
    for server, client in _servers(channel):
        try:
            info = server_info(client, "replication")
        except (redis.ConnectionError, redis.TimeoutError):
            continue  # the check of the server reports it
        if info is not None and int(info.get("connected_slaves", 0)) < wanted:
            yield Finding(
                "E028",
                f"dq_confirm_replicas = {wanted}, and {info.get('connected_slaves', 0)} replicas are "
                f"connected to {server}: every publish to it fails, although its message is stored.",
                "Start replicas, or lower the setting.",
            )


def rights(app: Any, channel: Any) -> Iterator[Finding]:
    """Whether the Redis user of ``broker_url`` may do what a publisher and a worker do."""
    options = dq_of(app).options
    roles = {role.name: role for role in ROLES}
    for name, code in (("publisher", "E014"), ("worker", "W014")):
        denied = denied_commands(channel.pool, roles[name], options)
        if denied:
            yield Finding(
                code,
                f"The Redis user of broker_url may not use what a {name} sends: {', '.join(denied)}"
                f" ({next(iter(denied.values()))}).",
                f"Grant {' '.join('+' + each for each in denied)} on the keys and channels of celery-dq, or"
                f" use another login where a {name} runs.",
            )
            return


def stock_messages(app: Any, channel: Any) -> Iterator[Finding]:
    """Whether messages of Celery's own Redis transport wait in the same database."""
    names = BrokerAccess(app, dq_of(app).context).queue_names()
    pipeline = channel.client.pipeline(transaction=False)
    for name in names:
        for pattern in _STOCK_LISTS:
            pipeline.llen(pattern.format(name))
    pipeline.hlen("unacked")
    # An error means a key of another type, which is not Celery's, or no right to read the key.
    *sizes, unacked = (
        0 if isinstance(each, Exception) else each for each in pipeline.execute(raise_on_error=False)
    )
    step = len(_STOCK_LISTS)
    waiting = {name: sum(sizes[place * step : (place + 1) * step]) for place, name in enumerate(names)}
    found = [f"{count} in queue {name!r}" for name, count in waiting.items() if count]
    if unacked:
        found.append(f"{unacked} delayed, or held by its workers")
    if found:
        yield Finding(
            "W015",
            f"Messages of Celery's Redis transport are in the same database: {', '.join(found)}. No worker on"
            " dq-redis:// reads them.",
            "Take them over: celery dq migrate redis://…; or run workers on redis:// until they are gone.",
        )


def dedup_server(app: Any) -> Iterator[Finding]:
    """Whether the Redis of the dedup locks can be reached, where one is used."""
    dq = dq_of(app)
    if not dq.options.dedup_url and (dq.serves_queues() or not uses_dedup(app)):
        return
    try:
        url = redis_of(app, dq.options)
    except ConfigurationError:
        return  # the check of the settings reports it
    setting = "dq_dedup_url" if dq.options.dedup_url else "broker_url or result_backend"
    yield from _reached(url, setting, "E016", "dedup locks")


def election_server(app: Any) -> Iterator[Finding]:
    """Whether the server of ``dq_election`` can be reached, and grants the session that is asked for."""
    options = dq_of(app).options
    if options.election.startswith("zookeeper://"):
        try:
            elections = Elections(options, "doctor", None, "doctor")
            try:
                elections.candidate("doctor")
                elections.session.ask(lambda client: client.exists_async("/"), PATIENCE_S)
                granted_s, wanted_s = elections.session.timeout_s, options.election_session_us / 1e6
                found = [*_open_nodes(elections.session, "dq_election")]
            finally:
                elections.close()
        except MissingLibrary:
            return  # check_settings reports it
        except (ConfigurationError, *_REFUSALS) as exc:
            yield Finding(
                "E017",
                f"dq_election cannot be reached: {reason_of(exc)}.",
                "Start ZooKeeper, or mend dq_election.",
            )
        else:
            yield Finding("I017", "The ZooKeeper of dq_election can be reached.")
            yield from found
            if granted_s != wanted_s:
                yield Finding(
                    "W033",
                    f"The ZooKeeper of dq_election ends a silent session after {granted_s:g} s, not after the"
                    f" {wanted_s:g} s of dq_election_session: so long may a leader be silent.",
                    f'Set dq_election_session = "{granted_s:g}s", or minSessionTimeout and maxSessionTimeout'
                    " of ZooKeeper.",
                )
    elif options.election:
        yield from _reached(options.election, "dq_election", "E017", "elections")


def _open_nodes(session: Any, setting: str) -> Iterator[Finding]:
    """Whether clients without the credentials in the settings may change nodes that are older than these."""
    # kazoo is imported only if a setting names a ZooKeeper.
    from celery_dq.zookeeper.open_nodes import open_nodes

    if session.open(PATIENCE_S).default_acl:
        found = list(open_nodes(session, ROOT, PATIENCE_S, most=MOST_NODES))
        if found:
            yield Finding(
                "W037",
                f"Nodes in the ZooKeeper of {setting} are older than its credentials, and open to every "
                f"client: {', '.join(found[:2])}{' and more' if found[2:] else ''}.",
                "When all programs have the credentials, close the nodes: "
                f"celery dq zookeeper {shell_word(session.hosts)} {ROOT} --close-nodes",
            )


def _reached(url: str, setting: str, code: str, purpose: str) -> Iterator[Finding]:
    try:
        with redis.Redis.from_url(
            url, socket_timeout=PATIENCE_S, socket_connect_timeout=PATIENCE_S
        ) as client:
            client.execute_command("TIME")
    except (redis.RedisError, OSError, ValueError) as exc:
        yield Finding(
            code,
            f"The Redis for {purpose} cannot be used: {reason_of(exc)}.",
            f"Correct the user and the password in {setting}."
            if refuses_login(exc)
            else f"Start it, or mend {setting}.",
        )
    else:
        yield Finding(f"I{code[1:]}", f"The Redis for {purpose} can be reached.")


def settings_quotas(app: Any, channel: Any) -> Iterator[Finding]:
    """Whether the quotas of these settings are those that workers have stored in the broker."""
    dq = dq_of(app)
    broker = BrokerAccess(app, dq.context)
    names = broker.queue_names()
    with broker.open_all(names) as queues:
        quotas = run_rounds(channel.client, [settings_quota(each.partitions[0]) for each in queues])
    for name, stored in zip(names, quotas, strict=True):
        options = dq.options.queue(name)
        if stored is None or (options.names_quota and options.quota == stored.quota):
            continue
        when = "" if stored.at is None else f" at {stored.at:%Y-%m-%d %H:%M:%S %Z}"
        these = f"name {options.quota}" if options.names_quota else "name no quota"
        yield Finding(
            "W016",
            f"For the tenants of queue {name!r} these settings {these}, and the broker holds {stored.quota},"
            f" which {stored.by} stored{when}.",
            "Restart the workers with the current settings, or run celery dq quotas apply "
            f"{shell_word(name)} with them.",
        )
