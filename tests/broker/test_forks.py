"""Processes that fork while they publish or consume."""

from __future__ import annotations

import os
import signal

import kombu

from celery_dq.testing.waiting import wait_until
from tests.broker.kombu_client import KombuClient, bodies, consumer_of


def test_a_fork_after_publishing_loses_nothing(kombu_client: KombuClient) -> None:
    # The case of a preforking web server: the parent has published, and its children inherit the connection.
    with kombu_client.connect() as connection:
        kombu_client.publish("parent", connection=connection)
        pids = []
        for child in range(2):
            pid = os.fork()
            if pid == 0:
                try:
                    for n in range(20):
                        kombu_client.publish(f"{child}-{n}", connection=connection)
                    os._exit(0)
                finally:
                    os._exit(1)
            pids.append(pid)
        for n in range(20):
            kombu_client.publish(f"parent-{n}", connection=connection)
        assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0, 0]
        assert kombu_client.depth() == 61


def test_a_fork_after_consuming_leaves_the_parent_its_messages(kombu_client: KombuClient) -> None:
    kombu_client.publish(1, 2)
    with kombu_client.connect() as connection, kombu_client.consuming(connection, prefetch=1) as got:
        kombu_client.drain(connection, got, 1)
        pid = os.fork()
        if pid == 0:
            try:
                # The child runs the exit functions of the interpreter.
                import atexit

                atexit._run_exitfuncs()
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        assert kombu_client.client.hlen(kombu_client.keys.held(consumer_of(connection))) == 1
        got[0].ack()
        kombu_client.drain(connection, got, 2)
        got[1].ack()
        wait_until(lambda: kombu_client.depth() == 0)


def test_a_child_that_closes_its_inherited_connection_does_not_affect_the_parent(
    kombu_client: KombuClient,
) -> None:
    kombu_client.publish(1)
    with kombu_client.connect() as connection, kombu_client.consuming(connection, prefetch=5) as got:
        kombu_client.drain(connection, got, 1)
        pid = os.fork()
        if pid == 0:
            try:
                connection.close()
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        # The parent still has its message, and receives the next one.
        assert kombu_client.client.hlen(kombu_client.keys.held(consumer_of(connection))) == 1
        kombu_client.publish(2)
        kombu_client.drain(connection, got, 2)
        assert bodies(got) == [1, 2]
        for message in got:
            message.ack()
        kombu_client.drain_until(connection, lambda: kombu_client.depth() == 0)


def test_a_child_may_use_the_connection_that_it_inherited(kombu_client: KombuClient) -> None:
    with kombu_client.connect() as connection:
        kombu_client.publish(1, 2, connection=connection)
        first = connection.default_channel.basic_get(kombu_client.queue)
        pid = os.fork()
        if pid == 0:
            try:
                connection.collect()
                with kombu_client.consuming(connection, prefetch=1) as got:
                    kombu_client.drain(connection, got, 1)
                    assert bodies(got) == [2]
                    got[0].ack()
                connection.close()
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert kombu_client.depth() == 1
        first.ack()
        wait_until(lambda: kombu_client.depth() == 0)


def test_a_connection_closed_after_a_fork_leaves_nothing_behind(kombu_client: KombuClient) -> None:
    # The child keeps the closed socket open, and a new connection reuses the file descriptor.
    with (
        kombu_client.connect(transport_options={"socket_timeout": 2.0}) as connection,
        kombu_client.consuming(connection) as got,
    ):
        wakeups = connection.default_channel.consumer.claims.wakeups
        kombu_client.drain_until(connection, lambda: wakeups.is_waiting)
        pid = os.fork()
        if pid == 0:
            try:
                signal.pause()
            finally:
                os._exit(0)
        try:
            with connection.Consumer([kombu.Queue("another")], on_message=got.append, accept=["json"]):
                kombu_client.drain_until(connection, lambda: wakeups.is_waiting)
                for n in range(3):
                    kombu_client.publish(n)
                    kombu_client.drain(connection, got, n + 1)
                    got[n].ack()
                kombu_client.drain_until(connection, lambda: kombu_client.depth() == 0)
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
