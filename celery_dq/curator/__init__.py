"""Queues in ZooKeeper that Java programs with Apache Curator can share.

Needs the extra ``celery-dq[zookeeper]``. The names are those of Curator's recipes.

``names``, ``framing``          node names and node data, byte for byte as Curator writes them
``serializing``                 items to bytes and back
``listing``                     the known nodes of a queue, and the time of the next listing
``item_ownership``              holds an item under a lock, or by deleting it first
``taking``                      takes free nodes in order
``consumer``                    calls a function with the items
``writer``                      puts nodes, each once
``queue``, ``kinds``            the queues that a program makes
``browse``                      looks at a queue without taking anything

User programs call the classes of ``kinds`` directly; Celery is not involved.
"""
