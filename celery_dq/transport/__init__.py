"""The brokers: kombu transports on Redis, on ZooKeeper, and above any other store.

``aliases``          the URL schemes, as kombu knows them
``broker_url``       URLs with several hosts, and the options that a URL may hold
``bases``            the parts of kombu's virtual transport that the brokers use
``tenant``           the rules for a tenant's name and a priority; pure
``envelope``         the compact form of headers and properties
``redis``            the tenant broker
``zookeeper``        the broker on ZooKeeper
``any_store``        the broker above a store that a user implements
``partition_store``  the protocol of one queue of a store; the partition in Redis holds it, too
``partition_replies``   the arguments and answers of its calls
``message_record``   a message as bytes, and its times; pure
``throttled``        the exception with which a task pauses its tenant
``packer``           checks, packs and stamps each message, on every way of publishing
``in_flight``        the messages that a process holds, as a consumer receives them, and their acks
``fetcher``          the thread that claims messages for a connection, beside Redis; its subscriptions
``threaded_…``       channel and delivery of the brokers with such a thread

kombu opens a transport by its URL. Options and protocols arrive in ``transport_options``.
"""
