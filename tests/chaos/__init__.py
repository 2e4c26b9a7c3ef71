"""Seeded chaos: a broker under load while workers and servers are killed, paused and cut off.

``python -m tests.chaos --help`` runs it against the stock broker or ours. The parts:

- :mod:`~tests.chaos.load` publishes numbered messages and remembers which publishes were confirmed;
- :mod:`~tests.chaos.tasks` is what workers run: every start and finish goes to the ledger;
- :mod:`~tests.chaos.ledger` is a Redis apart from the broker;
- :mod:`~tests.chaos.crew` keeps the workers; :mod:`~tests.chaos.proxy` stands between them and the broker;
- :mod:`~tests.chaos.faults` draws the schedule from the seed and commits the faults;
- :mod:`~tests.chaos.driver` runs all of it; :mod:`~tests.chaos.verdict` judges what the ledger holds.
"""
