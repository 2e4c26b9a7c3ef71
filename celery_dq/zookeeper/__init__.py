"""Sessions and transactions with ZooKeeper. Needs the extra ``celery-dq[zookeeper]``.

``credentials``        authentication, checked before a connection
``session``            one session, with listeners for CONNECTED, SUSPENDED and LOST
``transaction``        several changes that happen together or not at all
``idempotent_writer``  transactions that happen once although an answer was lost
``multi_read``         reads many nodes in few requests
``item_locks``         items under ephemeral locks
``open_nodes``         nodes that every client may change

kazoo's connection, with bounded waits, is ``celery_dq.compat.kazoo_connection``.

``celery_dq.leadership``, ``celery_dq.curator`` and ``celery_dq.transport.zookeeper`` build on this package.
"""
