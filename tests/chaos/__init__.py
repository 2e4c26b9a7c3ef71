"""Seeded chaos: a broker under load while workers and servers are killed, paused and cut off.

``python -m tests.chaos --help`` shows how to run it against the stock broker or celery-dq. The parts:

- :mod:`~tests.chaos.load` publishes numbered messages and records which publishes were confirmed;
- :mod:`~tests.chaos.tasks` has the tasks, which record each start and finish in the ledger;
- :mod:`~tests.chaos.ledger` is a Redis apart from the broker;
- :mod:`~tests.chaos.chaos_workers` starts the workers; :mod:`~tests.chaos.proxy` is between them and the
  broker;
- :mod:`~tests.chaos.faults` draws the schedule from the seed and commits the faults;
- :mod:`~tests.chaos.driver` runs all parts; :mod:`~tests.chaos.verdict` judges the records of the ledger.
"""
