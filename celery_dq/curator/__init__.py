"""Queues in ZooKeeper that Java programs with Apache Curator can share.

Needs the extra ``celery-dq[zookeeper]``. The names are those of Curator's recipes.

``names``, ``framing``          node names and node data, byte for byte as Curator writes them
``item_ownership``              holds an item under a lock, or by deleting it first
``taking``                      lists the nodes of a queue, and takes free ones in order
``consumer``                    calls a function with the items
``writer``                      puts nodes, each once
``queue``                       the queues that a program makes
``browse``                      looks at a queue without taking anything

User programs call the classes of ``queue`` directly; Celery is not involved.
"""
