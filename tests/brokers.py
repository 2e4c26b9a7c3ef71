"""The brokers under test, and their known differences from the documentation of kombu and Celery.

Conformance, chaos and the benchmarks all read this table: a broker joins them by one entry in ``BROKERS`` and
its name in ``ACTIVE``.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from tempfile import gettempdir
from typing import Any, NamedTuple, TypeVar

from celery import Celery

T = TypeVar("T")


class Deviation(NamedTuple):
    """A difference of a broker from the documentation, and its reason."""

    observed: Any
    reason: str


@dataclass(frozen=True)
class Broker:
    """One broker: its URL scheme, how to switch it on, and its known deviations."""

    name: str
    scheme: str
    sentinel_scheme: str
    #: The ends of the priority scale; the direction differs between brokers.
    most_urgent: int
    least_urgent: int
    #: ``module:function`` without arguments that makes the scheme known to kombu; '' when it is.
    register: str = ""
    #: ``module:function(app)`` that prepares a Celery app; '' when none is needed.
    setup: str = ""
    #: Whether a worker's death gives its messages back within a lease (stock: the visibility timeout).
    has_leases: bool = False
    #: Pools whose shared worker the conformance suite leaves out, because another pool drives the broker in
    #: the same way.
    left_out: tuple[str, ...] = ()
    deviations: Mapping[str, Deviation] = field(default_factory=dict)

    #: Kind of server: ``redis``, ``cluster``, ``zookeeper``, or ``file`` for none.
    server: str = "redis"
    #: Kombu's ``driver_type``.
    driver_type: str = "redis"

    def url(self, port: int, db: int = 0) -> str:
        """The broker URL of a server on this machine.

        ZooKeeper has folders in the place of databases. A cluster has one database only. For files, the port
        is a number of the run.
        """
        if self.server == "cluster":
            return f"{self.scheme}://127.0.0.1:{port}"
        if self.server == "file":
            return f"{self.scheme}:///{gettempdir()}/dq-conformance-{port}-{db}.sqlite"
        return f"{self.scheme}://127.0.0.1:{port}/{db}"

    def prepare(self) -> None:
        """Make the scheme known to kombu in this process."""
        if self.register:
            _resolve(self.register)()

    def prepare_app(self, app: Celery) -> None:
        """Make the scheme and the plugin known to a Celery app."""
        if self.setup:
            _resolve(self.setup)(app)

    def expected(self, subject: str, documented: T) -> T:
        """The result to assert: the documented one, unless this broker is listed as different."""
        deviation = self.deviations.get(subject)
        return documented if deviation is None else deviation.observed


def _resolve(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


#: Of a message that a worker gets while all its slots are taken.
WAITS_IN_GREEN_POOL = Deviation(
    False, "Celery looks at revokes when it hands a task to the green pool, which then makes it wait"
)

#: Of a warm shutdown.
RUNS_IN_THREADS = Deviation(
    False, "what was prefetched is in the thread pool's own queue, and the pool runs it empty"
)
RUNS_IN_GREENLETS = Deviation(
    False, "what was prefetched is a greenlet already, and the pool joins all of them"
)

STOCK = Broker(
    name="stock",
    scheme="redis",
    sentinel_scheme="sentinel",
    most_urgent=0,
    least_urgent=9,
    deviations={
        "requeued order": Deviation([1, 2, 0], "reject(requeue=True) pushes to the far end of the list"),
        "order after channel close": Deviation(
            [2, 0, 3], "restored one by one to the near end: newest first"
        ),
        "order after connection close": Deviation(
            [1, 0, 2, 3, 4], "restored one by one to the near end: newest first"
        ),
        "a stale acknowledgement": Deviation(
            [],
            "the delivery tag travels with the message: an old holder's ack settles the new delivery",
        ),
        "a warm shutdown starts nothing (threads)": RUNS_IN_THREADS,
        "a warm shutdown starts nothing (gevent)": RUNS_IN_GREENLETS,
        "a blip does not run a task twice": Deviation(
            False, "closing the channel restores every unacknowledged message, the running ones too"
        ),
        "delayed tasks wait in the broker": Deviation(
            False, "no delays of its own: a task with an ETA is fetched at once and waits in a worker"
        ),
        "passive declare of a deleted queue": Deviation(
            3, "deleting goes by the bindings, and a queue on the default exchange has none"
        ),
        "bodies after deleting and declaring": Deviation(
            ["old", "new"], "as above: the deletion did nothing"
        ),
        "passive declare of an emptied queue": Deviation(
            404, "an empty list is not a key in Redis, so the queue seems not to exist"
        ),
        "a revoke stops what waits for a slot (gevent)": WAITS_IN_GREEN_POOL,
    },
)

DQ = Broker(
    name="dq",
    scheme="dq-redis",
    sentinel_scheme="dq-sentinel",
    most_urgent=9,
    least_urgent=0,
    register="celery_dq.wiring:register_transports",
    setup="celery_dq:setup",
    has_leases=True,
    deviations={
        "a priority beyond the scale": Deviation(
            "refused", "an error that names the value, instead of a guess at what was meant"
        ),
        "a warm shutdown starts nothing (gevent)": Deviation(
            False, "green workers look at the shutdown flag between two drain_events only"
        ),
    },
)

CLUSTER = replace(
    DQ, name="cluster", scheme="dq-rediscluster", sentinel_scheme="", server="cluster", left_out=("eventlet",)
)

ZOOKEEPER = replace(
    DQ,
    name="zookeeper",
    scheme="dq-zookeeper",
    sentinel_scheme="",
    server="zookeeper",
    driver_type="zookeeper",
    # A worker of eventlet turns the drain_events of gevent, and takes ten seconds to start and stop.
    # It passes: empty this to see it.
    left_out=("eventlet",),
    deviations={
        **DQ.deviations,
        "a body of three megabytes": Deviation(
            "refused", "ZooKeeper takes one megabyte: the error is raised before anything is sent"
        ),
        "a revoke stops what waits for a slot (gevent)": WAITS_IN_GREEN_POOL,
        "a warm shutdown starts nothing (threads)": RUNS_IN_THREADS,
        "a warm shutdown starts nothing (gevent)": RUNS_IN_GREENLETS,
    },
)

SQLITE = replace(
    DQ,
    name="sqlite",
    scheme="dq-sqlite",
    sentinel_scheme="",
    server="file",
    driver_type="sqlite",
    deviations={**DQ.deviations, "a warm shutdown starts nothing (gevent)": RUNS_IN_GREENLETS},
)

BROKERS: Mapping[str, Broker] = {broker.name: broker for broker in (STOCK, DQ, CLUSTER, ZOOKEEPER, SQLITE)}

#: The brokers on Redis, for all suites and benchmarks.
ACTIVE: tuple[str, ...] = ("stock", "dq")
#: The brokers of the conformance suite.
CONFORMING: tuple[str, ...] = (*ACTIVE, "cluster", "zookeeper", "sqlite")
