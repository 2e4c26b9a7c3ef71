"""A broker, an election, a book, and workers that are candidates."""

from __future__ import annotations

from typing import Any

from celery import Celery
from kombu import pools

from celery_dq.testing.servers import RedisServer
from celery_dq.testing.waiting import wait_until
from tests.brokers import BROKERS
from tests.singleton.posting_app import NAME, QUEUE, Book, add_tasks
from tests.workers import WorkerProcess, make_app

#: So long that no session expires when the machine is stopped for a moment, because tests check token
#: numbers.
SESSION_S = 10.0
#: For tests in which a leader is killed or cut off and its session must expire.
SHORT_S = 4.0
#: Enough for any busy machine.
DEADLINE_S = 60.0


class PostingWorkers:
    def __init__(
        self,
        server: RedisServer,
        book: RedisServer,
        db: int,
        election: str = "",
        broker: str = "dq",
        **conf: Any,
    ) -> None:
        self.broker = BROKERS[broker]
        self.conf: dict[str, Any] = {
            "broker_url": self.broker.url(server.port, db),
            "result_backend": f"redis://127.0.0.1:{book.port}/1",
            "task_default_queue": QUEUE,
            "book_port": book.port,
            "dq_singleton_queues": [QUEUE],
            "dq_election": election,
            "dq_election_session": SESSION_S,
            "dq_lease": 4,
            **conf,
        }
        self.app: Celery = add_tasks(make_app(NAME, self.broker, self.conf), book.port)
        self.book = Book(book.port)
        self.book.clear()
        self._hired = 0

    def worker(self, pool: str = "prefork", concurrency: int = 2, **options: Any) -> WorkerProcess:
        self._hired += 1
        options.setdefault("name", f"w{self._hired}")
        options.setdefault("queues", [QUEUE])
        conf = {**self.conf, **options.pop("conf", {})}
        return WorkerProcess(
            "tests.singleton.posting_app",
            broker=self.broker,
            conf=conf,
            pool=pool,
            concurrency=concurrency,
            preloaded=True,
            **options,
        )

    def send(self, task: str, *args: Any, **options: Any) -> Any:
        return self.app.tasks[task].apply_async(args, **options)

    def post(self, numbers: range, task: str = "post", seconds: float = 0.0) -> list[int]:
        with self.app.connection_for_write() as connection:
            for number in numbers:
                self.send(task, number, seconds, connection=connection)
        return list(numbers)

    def finished(self, count: int, deadline: float = DEADLINE_S) -> list[int]:
        """Wait until `count` messages are finished; return their numbers in the order of the book."""
        wait_until(
            lambda: len(self.book.numbers("finish")) >= count,
            deadline,
            what=lambda: f"{count} finished; there are {self.book.numbers('finish')}",
        )
        return self.book.numbers("finish")

    def wait_started(self, number: int, times: int = 1, deadline: float = DEADLINE_S) -> None:
        wait_until(
            lambda: self.book.numbers("start").count(number) >= times, deadline, what=f"{number} to start"
        )

    def leaders(self, workers: int) -> dict[str, list[dict[str, Any]]]:
        """Return the queues that each worker reports to lead, by node name."""

        def all_answered() -> dict[str, list[dict[str, Any]]] | None:
            # The call ends as soon as all workers have answered.
            answers = self.app.control.broadcast("leaders", reply=True, timeout=2.0, limit=workers) or []
            rows = {node: rows for answer in answers for node, rows in answer.items()}
            return rows if len(rows) >= workers else None

        reported = wait_until(all_answered, DEADLINE_S, what=f"the answers of {workers} workers")
        assert reported is not None
        return reported

    def leader(self, workers: int = 1) -> str:
        """Return the node name of the worker that leads the queue and executes its messages."""

        def leading() -> str:
            for node, rows in self.leaders(workers).items():
                if any(row["phase"] == "executing" and row["queue"] == QUEUE for row in rows):
                    return node
            return ""

        return wait_until(leading, DEADLINE_S, what="a leader")

    def depose(self) -> None:
        """Delete the leader in the broker that holds the election."""
        with self.app.connection_for_write() as connection:
            channel: Any = connection.default_channel
            channel.client.delete(channel.partition(QUEUE).keys.leader)

    def forget_everything(self) -> None:
        """Empty the broker that holds the election."""
        with self.app.connection_for_write() as connection:
            channel: Any = connection.default_channel
            channel.client.flushdb()

    def overlaps(self) -> int:
        """Return how often a message started while another one was running."""
        found, running = 0, None
        for entry in self.book.entries():
            if entry.event == "start":
                found += running is not None
                running = entry.number
            elif entry.event == "finish" and running == entry.number:
                running = None
        return found

    def close(self) -> None:
        self.app.close()
        pools.reset()
        self.book.close()
