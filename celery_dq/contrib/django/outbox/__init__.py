"""The outbox: calls in a transaction are rows of its database, and a relay publishes them after the commit.

``tables``       inserts a row, bounds the table, reads its state; what ``app.dq.outbox`` calls
``relay_store``  numbers rows, and deletes those that the broker has
``relay``        the elected relay of one database
``worker_step``  makes each worker a candidate for the relays

The buffer's parts do the rest: ``AppSender`` packs and sends messages, ``Flusher`` repeats, splits and defers
batches, ``MessageBuffer`` orders them. Only the model of the row, in ``models.py``, is above this package.
"""
