"""A process forks while it publishes or consumes."""

from __future__ import annotations

import os

from celery_dq.testing.waiting import wait_until
from tests.broker.counter import Counter, bodies, consumer_of


def test_a_fork_after_publishing_loses_nothing(counter: Counter) -> None:
    # As a preforking web server does: the parent has published, the children inherit its connection.
    with counter.connect() as connection:
        counter.publish("parent", connection=connection)
        pids = []
        for child in range(2):
            pid = os.fork()
            if pid == 0:
                try:
                    for n in range(20):
                        counter.publish(f"{child}-{n}", connection=connection)
                    os._exit(0)
                finally:
                    os._exit(1)
            pids.append(pid)
        for n in range(20):
            counter.publish(f"parent-{n}", connection=connection)
        assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0, 0]
        assert counter.depth() == 61


def test_a_fork_after_consuming_leaves_the_parent_its_messages(counter: Counter) -> None:
    counter.publish(1, 2)
    with counter.connect() as connection, counter.consuming(connection, prefetch=1) as got:
        counter.drain(connection, got, 1)
        pid = os.fork()
        if pid == 0:
            try:
                # The child does what an interpreter does at its end.
                import atexit

                atexit._run_exitfuncs()
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        assert counter.client.hlen(counter.keys.held(consumer_of(connection))) == 1
        got[0].ack()
        counter.drain(connection, got, 2)
        got[1].ack()
        wait_until(lambda: counter.depth() == 0)


def test_a_child_that_closes_what_it_inherited_does_no_harm(counter: Counter) -> None:
    counter.publish(1)
    with counter.connect() as connection, counter.consuming(connection, prefetch=5) as got:
        counter.drain(connection, got, 1)
        pid = os.fork()
        if pid == 0:
            try:
                connection.close()
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        # The parent has its message still, and hears of the next one.
        assert counter.client.hlen(counter.keys.held(consumer_of(connection))) == 1
        counter.publish(2)
        counter.drain(connection, got, 2)
        assert bodies(got) == [1, 2]
        for message in got:
            message.ack()
        counter.drain_until(connection, lambda: counter.depth() == 0)


def test_a_child_may_use_the_connection_that_it_inherited(counter: Counter) -> None:
    with counter.connect() as connection:
        counter.publish(1, 2, connection=connection)
        first = connection.default_channel.basic_get(counter.queue)
        pid = os.fork()
        if pid == 0:
            try:
                connection.collect()
                with counter.consuming(connection, prefetch=1) as got:
                    counter.drain(connection, got, 1)
                    assert bodies(got) == [2]
                    got[0].ack()
                connection.close()
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert counter.depth() == 1
        first.ack()
        wait_until(lambda: counter.depth() == 0)
