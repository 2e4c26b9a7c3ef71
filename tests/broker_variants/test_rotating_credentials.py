"""A Redis user whose password changes: all long connections come back with the new password."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery

import celery_dq
from celery_dq.testing.servers import RedisServer
from celery_dq.testing.waiting import wait_until
from tests.broker_variants.rotating import PASSWORD_FILE, USER, FileCredentials
from tests.brokers import BROKERS
from tests.migration.worker_app import NAME, add_work
from tests.workers import WorkerProcess, make_app

MODULE = "tests.migration.worker_app"
PROVIDER = f"{FileCredentials.__module__}:{FileCredentials.__name__}"


class Rotation:
    """A server, its user, and the file with the user's password."""

    def __init__(self, server: RedisServer, file: Path) -> None:
        self.admin: Any = redis.Redis.from_url(server.url(0))
        self.file = file
        self.url = server.url(1, scheme="dq-redis") + f"?credential_provider={PROVIDER}"
        self.ledger_url = server.url(2)
        self.set_password("first")
        self.publish_password("first")

    def set_password(self, password: str) -> None:
        self.admin.execute_command(
            "ACL", "SETUSER", USER, "on", "resetpass", f">{password}", "~*", "&*", "+@all"
        )

    def publish_password(self, password: str) -> None:
        self.file.write_text(password)

    def end_connections(self) -> int:
        return int(self.admin.execute_command("CLIENT", "KILL", "USER", USER))

    @property
    def runs(self) -> dict[bytes, bytes]:
        with redis.Redis.from_url(self.ledger_url) as ledger:
            return dict(ledger.hgetall("runs"))


@pytest.fixture
def rotation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rotation]:
    monkeypatch.setenv(PASSWORD_FILE, str(tmp_path / "password"))
    with RedisServer() as server:
        yield Rotation(server, tmp_path / "password")


@pytest.mark.logged_error("Cannot connect to", "Connection to broker lost")
def test_a_rotated_password_loses_and_doubles_nothing(rotation: Rotation) -> None:
    conf = {"broker_url": rotation.url, "ledger_url": rotation.ledger_url, "dq_lease": "2s"}
    worker = WorkerProcess(MODULE, broker=BROKERS["dq"], conf=conf, pool="threads", preloaded=True)
    with add_work(make_app(NAME, BROKERS["dq"], conf)) as app, worker:
        work: Any = app.tasks["work"]

        def publish(numbers: range) -> None:
            for number in numbers:
                work.delay(number, f"t{number % 3}")

        publish(range(20))
        # The service knows the new password first, then the provider, then it ends the connections.
        rotation.set_password("second")
        rotation.publish_password("second")
        assert rotation.end_connections() >= 3
        publish(range(20, 40))
        wait_until(lambda: len(rotation.runs) == 40, 30)
        # The provider is late: for a while it gives a password that is refused.
        rotation.set_password("third")
        rotation.end_connections()
        worker.wait_for_log("invalid username-password pair", 30)
        rotation.publish_password("third")
        publish(range(40, 60))
        wait_until(lambda: len(rotation.runs) == 60, 60)
        assert {*rotation.runs.values()} == {b"1"}
        push: Any = app
        wait_until(lambda: push.dq.queues[NAME].snapshot().held == 0, 30)
        pool: Any = app.pool
        pool.force_close_all()


def test_a_provider_can_be_an_object(rotation: Rotation) -> None:
    with Celery("shop", broker=rotation.url.partition("?")[0], set_as_current=False) as app:
        celery_dq.setup(app)
        with app.connection_for_write() as connection:
            connection.credential_provider = FileCredentials()
            channel: Any = connection.default_channel
            client = channel.client
            assert client.execute_command("ACL", "WHOAMI") == USER.encode()
