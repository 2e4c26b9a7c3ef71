"""The end of a process in which gevent runs threads of the package."""

from __future__ import annotations

import subprocess
import sys

from tests.broker.kombu_client import KombuClient

CONSUMER = """
from gevent import monkey
monkey.patch_all()
import sys
import gevent
from kombu import Connection
from celery_dq.transport.redis.consuming import consumer_thread

leave = consumer_thread.leave_green_hub

def leave_slowly():
    # As a thread that the machine lets wait: in a greenlet, while the interpreter ends.
    gevent.sleep(0.3)  # the delay that is tested
    leave()
    print("left", flush=True)

consumer_thread.leave_green_hub = leave_slowly
from celery_dq.transport.aliases import register_transports
register_transports()
with Connection(sys.argv[1]) as connection:
    queue = connection.SimpleQueue(sys.argv[2])
    queue.get(timeout=30).ack()
    thread = connection.default_channel.identity.threads.main
    queue.close()
connection.close()
while thread.is_running:
    gevent.sleep(0.01)  # lets the condition be looked at again
"""


def test_a_process_with_gevent_exits_after_the_end_of_its_thread(kombu_client: KombuClient) -> None:
    kombu_client.publish(1)
    ended = subprocess.run(
        [sys.executable, "-c", CONSUMER, kombu_client.broker_url, kombu_client.queue],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "left\n", "")
