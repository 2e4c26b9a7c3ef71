"""The brokers: kombu transports on Redis and on ZooKeeper.

``aliases``          the URL schemes, as kombu knows them
``bases``            the parts of kombu's virtual transport that both brokers use
``tenant``           the rules for a tenant's name and a priority; pure
``envelope``         the compact form of headers and properties
``stored_message``   a message as either broker delivers it
``prefetch``         how much more a channel may deliver
``queue_arguments``  queue arguments that the brokers refuse or ignore
``redis``            the tenant broker
``zookeeper``        the broker on ZooKeeper

kombu opens a transport by its URL. Options and protocols arrive in ``transport_options``.
"""
