"""Which file of the spill log holds which message of which lane. Not thread-safe.

Of each lane: *sealed* files, then the *open* one. What is in memory too is a prefix of that; the rest is
*stored*: loaded file by file when its turn comes.
"""

from __future__ import annotations

import logging
import struct
from collections import deque
from collections.abc import Callable, Iterable

from celery_dq.errors import CorruptSegment, SpillFailed
from celery_dq.producer.buffer import Lane, Message
from celery_dq.producer.segment import Header, Record, pack_header, pack_record
from celery_dq.producer.spill_log import Orphan, Segment, SpillLog, StoredSegment
from celery_dq.producer.unsynced import Unsynced

__all__ = ["Journal", "Unread"]

logger = logging.getLogger(__name__)

#: A segment is sealed once it has so many bytes.
SEGMENT_BYTES = 1024 * 1024

_ID = struct.Struct("<B")

#: Reads the messages of a file that were not in memory, away from any lock.
Unread = Callable[[], list[Message]]


class _Files:
    """The segments of one lane, in the order of their messages."""

    __slots__ = ("doubtful", "loaded", "open", "open_is_stored", "stored")

    def __init__(self) -> None:
        #: (segment, last sequence): sealed, and in memory too.
        self.loaded: deque[tuple[Segment | StoredSegment, int]] = deque()
        #: Sealed, on disk only.
        self.stored: deque[Segment | StoredSegment] = deque()
        self.open: Segment | None = None
        self.open_is_stored = False
        #: Sealed ones that the disk did not write: to be written anew.
        self.doubtful: list[Segment] = []

    def last_before(self, segment: Segment) -> int:
        """The last message in memory that an earlier file has."""
        last = -1
        for each, end in list(self.loaded):  # a file that is read joins them at any time
            if each is segment:
                break
            last = max(last, end)
        return last

    def put_in_place(self, poisoned: Segment, anew: Segment) -> None:
        """Take a file that was written anew for the one that could not be synced. Raises SpillFailed."""
        if self.open is poisoned:
            self.open = anew
            return
        anew.seal()
        for place, (each, last) in enumerate(list(self.loaded)):
            if each is poisoned:
                self.loaded[place] = (anew, last)
                break
        else:
            if poisoned not in self.stored:
                raise SpillFailed("it is being read")
            self.stored[self.stored.index(poisoned)] = anew
        self.doubtful.remove(poisoned)


class Journal:
    """The files of the lanes.

    :param log: where they are.
    :param max_bytes: that they may take, other processes' files and the quarantine included.
    :param sync_on_seal: whether a segment is synced before it is sealed.
    """

    def __init__(self, log: SpillLog, max_bytes: int, *, sync_on_seal: bool = False) -> None:
        self.log = log
        self.max_bytes = max_bytes
        self.sync_on_seal = sync_on_seal
        #: Bytes of our files.
        self.bytes = 0
        #: Bytes of everybody else's, as of the last look.
        self.others_bytes = 0
        self._lanes: dict[bytes, _Files] = {}
        self._orphans: dict[bytes, Orphan] = {}

    # -- writing

    def append(self, lane: Lane, message: Message, *, stored: bool) -> None:
        """Write a message down.

        :param stored: it is not in memory.

        Raises:
            SpillFailed: It is not written: the disk or the allowance is full, or the folder is gone.
        """
        files = self._lanes.get(lane.producer)
        if files is None:
            files = self._lanes[lane.producer] = _Files()
        segment = files.open
        if segment is not None and (
            segment.size >= SEGMENT_BYTES or segment.torn or (stored and not files.open_is_stored)
        ):
            self._seal(files)
            segment = None
        if self.bytes + self.others_bytes + len(message.payload) > self.max_bytes:
            raise SpillFailed(f"{self.log.root}: dq_buffer_max_spill_bytes = {self.max_bytes} are used up")
        if segment is None:
            segment = files.open = self.log.create(lane.producer, lane.key)
            files.open_is_stored = stored
            self.bytes += segment.size
        self.bytes += segment.append(
            message.sequence, 0, _ID.pack(len(message.id)) + message.id + message.payload
        )

    def _seal(self, files: _Files) -> None:
        segment, files.open = files.open, None
        if segment is None:
            return
        if self.sync_on_seal:
            try:
                segment.sync()
            except OSError:
                files.doubtful.append(segment)  # whoever syncs next writes it anew, or is told
        segment.seal()
        if files.open_is_stored:
            files.stored.append(segment)
        else:
            files.loaded.append((segment, segment.last))
        files.open_is_stored = False

    # -- the broker has it

    def delivered(self, lane: Lane, sequence: int) -> None:
        """All messages of the lane up to `sequence` are delivered: their files go."""
        files = self._lanes.get(lane.producer)
        if files is None:
            return
        loaded = files.loaded
        while loaded and loaded[0][1] <= sequence:
            segment, _ = loaded.popleft()
            segment.unlink()
            if isinstance(segment, Segment):
                self.bytes -= segment.size
        segment_open = files.open
        if (
            segment_open is not None
            and not files.open_is_stored
            and segment_open.header_size < segment_open.size
            and segment_open.last <= sequence
        ):
            self.bytes -= segment_open.size
            try:
                segment_open.empty()
                self.bytes += segment_open.size
            except OSError:
                segment_open.unlink()
                files.open = None

    def forget(self, lane: Lane) -> None:
        """The lane is empty and will not be used again."""
        files = self._lanes.pop(lane.producer, None)
        if files is not None and files.open is not None:
            self.bytes -= files.open.size
            files.open.unlink()
        orphan = self._orphans.pop(lane.producer, None)
        if orphan is not None and orphan not in self._orphans.values():
            orphan.close()

    # -- reading

    def next_stored(self, lane: Lane) -> Unread | None:
        """Take the lane's next stored file; what is returned reads it. From then on it counts as loaded."""
        files = self._lanes.get(lane.producer)
        if files is None:
            return None
        if not files.stored:
            if files.open is None or not files.open_is_stored:
                return None
            self._seal(files)
        segment = files.stored.popleft()
        orphan = self._orphans.get(lane.producer)

        def read() -> list[Message]:
            try:
                records = segment.read() if isinstance(segment, Segment) else _must(orphan).read(segment)
            except (OSError, CorruptSegment) as error:
                self.log.quarantine(segment.path, str(error))
                records = []
            messages = list(_messages(records))
            last = messages[-1].sequence if messages else -1
            files.loaded.append((segment, last))
            return messages

        return read

    def has_stored(self, lane: Lane) -> bool:
        """Whether the lane has a file that :meth:`next_stored` would return."""
        files = self._lanes.get(lane.producer)
        return files is not None and bool(files.stored or (files.open is not None and files.open_is_stored))

    # -- what others left

    def look_for_orphans(self) -> list[tuple[Orphan, list[StoredSegment]]]:
        """Adopt the folders of dead processes: locked, and looked through. Needs no lock of the caller's."""
        found = []
        for orphan in self.log.orphans():
            segments = self._segments_of(orphan)
            if segments:
                found.append((orphan, segments))
            else:
                orphan.close()
        return found

    def _segments_of(self, orphan: Orphan) -> list[StoredSegment]:
        try:
            return orphan.segments()
        except OSError as error:
            logger.warning("Spill log: %s cannot be read now: %s", orphan.folder, error)
            return []

    def take_over(
        self, orphan: Orphan, segments: Iterable[StoredSegment], known: Callable[[str, bytes], Lane]
    ) -> list[Lane]:
        """Make stored files of an orphan's segments.

        :param known: returns the lane for a key and a producer.

        Returns:
            The lanes that have them now.
        """
        adopted: list[Lane] = []
        for segment in segments:
            header = segment.header
            holder = self._orphans.setdefault(header.producer, orphan)
            if holder is not orphan:
                continue  # what another folder has of that producer comes first; this, in a later round
            if header.producer not in self._lanes:
                self._lanes[header.producer] = _Files()
                adopted.append(known(header.lane, header.producer))
            self._lanes[header.producer].stored.append(segment)
        if adopted:
            logger.info("Spill log: took over %s.", orphan.folder.name)
        else:
            orphan.close()
        return adopted

    # -- syncing

    def dirty(self) -> list[Unsynced]:
        """The files that are not synced, to be synced away from any lock."""
        found = []
        for producer, files in self._lanes.items():
            if files.doubtful:
                files.doubtful = [each for each in files.doubtful if not each.gone]
                found += [Unsynced(producer, each) for each in files.doubtful]
            if files.open is not None and files.open.synced < files.open.size:
                found.append(Unsynced(producer, files.open))
        return found

    def rewrite(self, lane: Lane, poisoned: Segment, unsent: Iterable[Message]) -> None:
        """A file could not be synced, so it is not to be trusted: write its messages to a new one.

        :param unsent: the lane's messages in memory, in order.

        Raises:
            SpillFailed: The new one cannot be written or synced either.
        """
        files = self._lanes.get(lane.producer)
        if files is None or poisoned.gone:
            return
        if poisoned is not files.open and poisoned not in files.doubtful:
            files.doubtful.append(poisoned)  # it was sealed while somebody synced it
        segment = None
        try:
            messages = _kept(poisoned, files.last_before(poisoned), unsent)
            segment = self.log.create(lane.producer, lane.key, poisoned.header.number)
            for message in messages:
                segment.append(message.sequence, 0, _ID.pack(len(message.id)) + message.id + message.payload)
            segment.sync()
            files.put_in_place(poisoned, segment)
        except (OSError, CorruptSegment) as error:
            if segment is not None:
                # What it repeats is in the poisoned one. It would be sent again, long after that has gone.
                segment.unlink()
            raise SpillFailed(
                f"{poisoned.path}: what could not be synced could not be written anew: {error}"
            ) from error
        self.bytes += segment.size - poisoned.size
        poisoned.unlink()

    def drop(self, lane: Lane) -> None:
        """The lane's files were taken away."""
        files = self._lanes.pop(lane.producer, None)
        if files is not None and files.open is not None:
            files.open.seal()

    def forsake(self) -> None:
        """Begin a new folder; every lane must have been dropped."""
        self.bytes = 0
        self.log.forsake()

    def stored_files(self, lane: Lane) -> int:
        """How many sealed files of the lane are on disk only."""
        files = self._lanes.get(lane.producer)
        return 0 if files is None else len(files.stored)

    # -- the end

    def reject(self, lane: Lane, message: Message, why: str) -> None:
        """Keep a message that the broker refuses, as a segment in the quarantine."""
        head, seed = pack_header(Header(lane.producer, 0, lane.key))
        record = pack_record(
            message.sequence, 0, _ID.pack(len(message.id)) + message.id + message.payload, seed
        )
        self.log.quarantine(self.log.root / "rejected" / str(message.sequence), why, head + record)

    def close(self) -> None:
        """Leave everything as it is to whoever adopts it; remove what is empty."""
        for files in self._lanes.values():
            segment = files.open
            if segment is not None and segment.size <= segment.header_size:
                segment.unlink()
            elif segment is not None:
                segment.seal()
        for orphan in set(self._orphans.values()):
            orphan.close()
        self._lanes.clear()
        self._orphans.clear()
        self.log.close()

    def abandon(self) -> None:
        """We are a forked child: close the descriptors that belong to the parent, and nothing else."""
        for files in self._lanes.values():
            if files.open is not None:
                files.open.seal()
        self._lanes.clear()
        self.log.forsake()


def _messages(records: Iterable[Record]) -> Iterable[Message]:
    for record in records:
        payload = record.payload
        end = 1 + payload[0]
        yield Message(record.sequence, payload[1:end], payload[end:])


def _kept(poisoned: Segment, before: int, unsent: Iterable[Message]) -> list[Message]:
    """What the file has; delivered ones may be left out. Raises OSError or CorruptSegment."""
    kept = [each for each in unsent if before < each.sequence <= poisoned.last]
    if kept and kept[-1].sequence == poisoned.last:
        return kept
    # Stored messages are not in memory; the kernel may still have what it could not write.
    kept = list(_messages(poisoned.read()))
    if poisoned.size > poisoned.header_size and (not kept or kept[-1].sequence != poisoned.last):
        raise CorruptSegment("its messages are on disk only, and cannot be read back")
    return kept


def _must(orphan: Orphan | None) -> Orphan:
    assert orphan is not None
    return orphan
