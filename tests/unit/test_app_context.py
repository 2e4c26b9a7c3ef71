"""The context that an app passes to its transport."""

from __future__ import annotations

import copy
import json
import os
import pickle
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery
from kombu import Connection
from kombu.serialization import dumps
from kombu.transport import TRANSPORT_ALIASES

import celery_dq
from celery_dq.app.api.api import dq_of
from celery_dq.context import APP_CONTEXT, AppContext
from celery_dq.errors import ConfigurationError
from celery_dq.options import Options
from celery_dq.wiring import Equipment, equip_every_app, register_transports
from tests.apps import DQCelery


def options() -> Options:
    """The result of a resolver."""
    return Options(environment="sandbox")


def context_of(connection: Connection) -> object:
    """Return the context that a connection passes to its transport."""
    return (connection.transport_options or {}).get(APP_CONTEXT)


def in_child(look: Any) -> str:
    """Return the result of `look` in a forked child."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.write(write, str(look()).encode())
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with os.fdopen(read) as pipe:
        return pipe.read()


def test_no_two_apps_share_connections_even_if_the_first_is_gone() -> None:
    """kombu's pools outlive an app; its address may be that of a later one."""

    def pool_key() -> str:
        return repr(dq_of(Celery("shop")).context)

    assert len({pool_key() for _ in range(20)}) == 20


def test_options_are_resolved_once_and_late() -> None:
    calls: list[int] = []

    def resolve() -> Options:
        calls.append(1)
        return options()

    context = AppContext("shop", resolve)
    assert calls == []
    assert context.options is context.options
    assert calls == [1]


def test_the_own_objects_of_a_process_are_not_inherited_by_its_child() -> None:
    context = AppContext("shop", options)
    context.process = "mine"
    context.capacity = object()  # type: ignore[assignment]  # any object will do
    assert in_child(lambda: [context.process, context.capacity]) == "[None, None]"
    assert context.process == "mine"
    assert context.in_process(list) == "mine"  # type: ignore[comparison-overlap]  # the present state stays
    assert in_child(lambda: context.in_process(lambda: "made again")) == "made again"


def test_context_travel_with_transport_options() -> None:
    context = AppContext("shop", options)
    assert (copy.copy(context), copy.deepcopy({"a": context})["a"]) == (context, context)
    assert copy.deepcopy(context) is context
    back = pickle.loads(pickle.dumps(context))
    assert (str(back), back.options, back.process) == ("shop", options(), None)
    assert json.loads(dumps({"broker": {"transport_options": {"dq": context}}}, "json")[2])
    assert repr(context) == "'shop'"


def test_registering_transports_is_idempotent_and_keeps_the_others() -> None:
    register_transports()
    register_transports()
    assert TRANSPORT_ALIASES["dq-redis"] == "celery_dq.transport.redis.transport:Transport"
    assert {"dq-rediss", "dq-sentinel"} <= TRANSPORT_ALIASES.keys()


def test_every_connection_of_an_app_finds_its_context() -> None:
    with Celery("a", broker="memory://", set_as_current=False) as plain:
        other: DQCelery = celery_dq.setup(Celery("b", broker="memory://", set_as_current=False))
        one: DQCelery = celery_dq.setup(plain)
        for connection in (
            one.connection_for_read(),
            one.connection_for_write(),
            one.connection(),
            one.amqp.Connection(),
        ):
            assert context_of(connection) is one.dq.context
            assert context_of(connection.clone()) is one.dq.context
        assert context_of(other.connection_for_write()) is other.dq.context
        # With equal labels, kombu's pools would share connections between the two apps.
        assert hash(one.connection_for_write()) != hash(other.connection_for_write())
        other.close()


def test_settings_are_read_whenever_they_come() -> None:
    with Celery("late", broker="memory://", set_as_current=False) as plain:
        app: DQCelery = celery_dq.setup(plain)
        app.config_from_object({"dq_lease": 30})
        app.conf.dq_environment = "sandbox"
        assert not app.dq.context._options
        assert (app.dq.options.lease_us, app.dq.options.environment) == (30_000_000, "sandbox")


def test_a_wrong_setting_stops_a_worker_and_a_producer_at_their_first_connection() -> None:
    with Celery("wrong", broker="memory://", set_as_current=False) as app:
        celery_dq.setup(app)
        app.conf.dq_leese = 3
        for start in (app.connection_for_read, lambda: app.send_task("x"), lambda: app.Worker(pool="solo")):
            with pytest.raises(ConfigurationError, match="did you mean 'dq_lease'"):
                start()


@pytest.mark.parametrize("url", ["dq-redis://localhost", "memory://"])
def test_a_worker_does_not_start_on_a_connection_that_the_app_has_not_made(url: str) -> None:
    with Celery("own", broker=url, set_as_current=False) as plain:
        app: Any = celery_dq.setup(plain)
        app.connection_for_read = lambda *_, **__: Connection(url)
        with pytest.raises(ConfigurationError, match=r"return app\.connection\(…\)"):
            app.Worker(pool="solo")


def test_the_settings_stay_printable() -> None:
    with Celery("print", broker="memory://", set_as_current=False) as app:
        celery_dq.setup(app)
        app.conf.broker_transport_options = {"visibility_timeout": 5}
        app.connection_for_write()
        assert app.conf.table()["broker_transport_options"] == {"visibility_timeout": 5}
        assert json.dumps(app.connection_for_write().info(), default=str)


def test_the_celery_command_sets_up_apps_that_were_not_set_up() -> None:
    before = set(Celery.builtin_fixups)
    try:
        equip_every_app()
        equip_every_app()
        assert len(Celery.builtin_fixups - before) <= 1
        with Celery(uuid4().hex, broker="dq-redis://localhost", set_as_current=False) as ours:
            assert "dq" not in vars(ours)
            assert ours.conf.broker_url
            assert context_of(ours.connection_for_write()) is vars(ours)["dq"].context
        with Celery(uuid4().hex, broker="memory://", set_as_current=False) as stock:
            assert stock.conf.broker_url
            assert "dq" not in vars(stock)
        assert f"{Equipment.__module__}:Equipment" in Celery.builtin_fixups
    finally:
        Celery.builtin_fixups.intersection_update(before)


def test_plain_kombu_knows_the_scheme_once_registered() -> None:
    register_transports()
    assert Connection("dq-redis://localhost").transport_cls == "dq-redis"
