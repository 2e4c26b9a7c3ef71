"""The buffered producer: calls return at once, a flusher thread talks to the broker.

The words of this room: a *buffer* holds messages in *lanes*; a *spill log* keeps them on disk in
*segments* until the broker has them; after *linger* or a full batch the *flusher* sends them; what a dead
process left behind is *adopted* and *replayed*. A *singular update queue* has one thread that owns a state.
"""

from __future__ import annotations
