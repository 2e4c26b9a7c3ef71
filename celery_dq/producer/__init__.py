"""The buffered producer: calls return at once, and a flusher thread talks to the broker.

A *buffer* holds messages in *lanes*, one per queue, partition and priority. A *spill log* keeps them on
disk in *segments* until the broker has them. The *flusher* sends after *linger* or with a full batch.
Messages of a dead process are *adopted* and *replayed*.

``buffer``, ``segment``                         which message is next, and the bytes of a file; pure
``spill_log``, ``segment_index``                the files
``message_store``                               buffer and spill log under one lock
``sender``, ``kombu_sender``                    sends a batch
``flusher``                                     the thread, and when it waits
``buffered_producer``, ``buffering_producer``   what calls use
``singular_update_queue``                       one thread that owns a state

``celery_dq.app`` makes one producer per app and process.
"""

from __future__ import annotations
