"""Shipped for users and their tests: real servers that start at once, and waits with a deadline.

``servers``, ``redis_cluster``, ``zookeeper``   servers of one's own
``local_server``, ``processes``                 starting a server, waiting for its service, ending it
``waiting``                                     ``wait_until`` with a deadline
``apps``                                        lets an app use another broker for a while
``sqlite_broker``                               a broker without a server (``dq-sqlite://``)
``pytest``                                      fixtures: a broker for each test, and a worker

The tests of celery-dq and of its users import this package; the rest of celery-dq does not.
"""

from __future__ import annotations
