"""Leases in Redis: how the broker learns which messages this process holds, and of their acks.

``in_doubt``            claims without an answer, and how their messages are found again
``data_loss``           what heartbeats and claims reveal
``consumer_identity``   one consumer id per process and broker; owns the objects above

The messages and their pending acks are those of ``transport/in_flight``. ``consuming`` adds messages,
``channel`` acknowledges them, and the worker's task events reach both.
"""
