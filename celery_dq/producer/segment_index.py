"""The segment index: which file of the spill log holds which message of which lane. Not thread-safe.

A lane has *sealed* files, followed by one *open* file. The messages that are in memory too are a prefix of
them. The later files are *stored*: they are on disk only, and are loaded one by one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

from celery_dq.errors import CorruptSegment, SpillFailed
from celery_dq.outage import Outage
from celery_dq.producer.buffer import BufferedMessage, Lane
from celery_dq.producer.segment import FileHeader, pack_header, pack_record
from celery_dq.producer.spill_log import Orphan, PendingSync, Segment, SpillLog, StoredSegment
from celery_dq.shown import shown_logger

__all__ = ["SegmentIndex", "Unread"]

logger = shown_logger(__name__)

#: Size in bytes at which a segment is sealed.
SEGMENT_BYTES = 1024 * 1024

#: Reads the messages of a stored file. The caller holds no lock.
Unread = Callable[[], list[BufferedMessage]]


class _Files:
    """The segments of one lane, in the order of their messages."""

    __slots__ = ("doubtful", "loaded", "open", "open_is_stored", "stored")

    def __init__(self) -> None:
        #: Sealed files whose messages are in memory too, each with its last sequence.
        self.loaded: deque[tuple[Segment | StoredSegment, int]] = deque()
        #: Sealed files that are on disk only.
        self.stored: deque[Segment | StoredSegment] = deque()
        self.open: Segment | None = None
        self.open_is_stored = False
        #: Sealed files whose sync failed; their messages must be written again.
        self.doubtful: list[Segment] = []

    def last_before(self, segment: Segment) -> int:
        """Return the sequence of the last message in memory that an earlier file holds."""
        last = -1
        for each, end in list(self.loaded):  # a copy, because a reader may append at any time
            if each is segment:
                break
            last = max(last, end)
        return last

    def put_in_place(self, poisoned: Segment, rewritten: Segment) -> None:
        """Replace a file that could not be synced by its rewritten copy.

        Raises:
            SpillFailed: The file is being read.
        """
        if self.open is poisoned:
            self.open = rewritten
            return
        rewritten.seal()
        for place, (each, last) in enumerate(list(self.loaded)):
            if each is poisoned:
                self.loaded[place] = (rewritten, last)
                break
        else:
            if poisoned not in self.stored:
                raise SpillFailed("it is being read")
            self.stored[self.stored.index(poisoned)] = rewritten
        self.doubtful.remove(poisoned)


class SegmentIndex:
    """The files of all lanes of one process.

    Args:
        log: The spill log that creates and adopts the files.
        max_bytes: Limit in bytes of the whole folder, including files of other processes and the quarantine.
        sync_on_seal: Whether a segment is synced before it is sealed.

    Attributes:
        bytes: Size of the files of this process.
        others_bytes: Size of all other files in the folder, measured at the last look for orphans.
    """

    def __init__(self, log: SpillLog, max_bytes: int, *, sync_on_seal: bool = False) -> None:
        self.log = log
        self.max_bytes = max_bytes
        self.sync_on_seal = sync_on_seal
        self.bytes = 0
        self.others_bytes = 0
        self._lanes: dict[bytes, _Files] = {}
        self._orphans: dict[bytes, Orphan] = {}
        self._unreadable = Outage(logger, "spill_unreadable")

    # -- writing

    def append(self, lane: Lane, message: BufferedMessage, *, stored: bool) -> None:
        """Write a message to the open file of its lane.

        Args:
            lane: The lane of the message.
            message: The message.
            stored: Whether the message will be on disk only.

        Raises:
            SpillFailed: The message was not written: the disk or the allowance is full, or the folder is
                gone.
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
            raise SpillFailed(
                f"{self.log.root} has reached dq_buffer_max_spill_bytes = {self.max_bytes}: raise the limit, "
                f"or "
                "restore the broker so that messages leave"
            )
        if segment is None:
            segment = files.open = self.log.create(lane.producer, lane.key)
            files.open_is_stored = stored
            self.bytes += segment.size
        self.bytes += segment.append(message)

    def _seal(self, files: _Files) -> None:
        segment, files.open = files.open, None
        if segment is None:
            return
        if self.sync_on_seal:
            try:
                segment.sync()
            except OSError:
                files.doubtful.append(segment)  # the next sync writes its messages again, or fails
        segment.seal()
        if files.open_is_stored:
            files.stored.append(segment)
        else:
            files.loaded.append((segment, segment.last))
        files.open_is_stored = False

    # -- delivery

    def delivered(self, lane: Lane, sequence: int) -> None:
        """Remove the files of a lane whose messages, up to `sequence`, are all delivered."""
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
        """Remove an empty lane that will not be used again."""
        files = self._lanes.pop(lane.producer, None)
        if files is not None and files.open is not None:
            self.bytes -= files.open.size
            files.open.unlink()
        orphan = self._orphans.pop(lane.producer, None)
        if orphan is not None and orphan not in self._orphans.values():
            orphan.close()

    # -- reading

    def next_stored(self, lane: Lane) -> Unread | None:
        """Take the next stored file of a lane.

        Returns:
            A function that reads the file, which then counts as loaded; None when the lane has no stored
            file.
        """
        files = self._lanes.get(lane.producer)
        if files is None:
            return None
        if not files.stored:
            if files.open is None or not files.open_is_stored:
                return None
            self._seal(files)
        segment = files.stored.popleft()

        def read() -> list[BufferedMessage]:
            messages = self.log.read(segment)
            if messages is None:
                # The file is in the quarantine now, or it stays for the process that adopts this folder.
                if isinstance(segment, Segment):
                    self.bytes -= segment.size
                return []
            last = messages[-1].sequence if messages else -1
            files.loaded.append((segment, last))
            return messages

        return read

    def has_stored(self, lane: Lane) -> bool:
        """Whether the lane has a file that :meth:`next_stored` would return."""
        files = self._lanes.get(lane.producer)
        return files is not None and bool(files.stored or (files.open is not None and files.open_is_stored))

    # -- folders of dead processes

    def look_for_orphans(self) -> list[tuple[Orphan, list[StoredSegment]]]:
        """Lock the folders of dead processes and list their segments. The caller need not hold a lock.

        Returns:
            The folders that hold segments. A folder that cannot be read is left for the next call.
        """
        orphans = []
        failed = False
        for orphan in self.log.orphans():
            try:
                segments = orphan.segments()
            except OSError as error:
                failed = True
                self._unreadable.began(
                    "Spill log folder %s of a dead process cannot be read (will retry): %s. Its messages "
                    "wait.",
                    orphan.folder,
                    error,
                )
                segments = []
            if segments:
                orphans.append((orphan, segments))
            else:
                orphan.close()
        if self.log.refused is not None:
            failed = True
            self._unreadable.began(
                "Spill log %s has messages of dead processes that are not sent (will retry): %s.",
                self.log.root,
                self.log.refused.strerror or self.log.refused,
            )
        if not failed:
            self._unreadable.over("All folders of spill log %s can be read again.", self.log.root)
        return orphans

    def take_over(
        self, orphan: Orphan, segments: Iterable[StoredSegment], known: Callable[[str, bytes], Lane]
    ) -> list[Lane]:
        """Add the segments of an adopted folder to the stored files.

        Args:
            orphan: The adopted folder; it is closed if none of its segments is added.
            segments: The segments of the folder, in order.
            known: Returns the lane for a key and a producer sequence.

        Returns:
            The lanes that received segments.
        """
        adopted: list[Lane] = []
        for segment in segments:
            header = segment.header
            holder = self._orphans.setdefault(header.producer, orphan)
            if holder is not orphan:
                continue  # another folder of the same producer is sent first; a later round adopts this one
            if header.producer not in self._lanes:
                self._lanes[header.producer] = _Files()
                adopted.append(known(header.lane, header.producer))
            self._lanes[header.producer].stored.append(segment)
        if adopted:
            logger.info(
                "Adopted spill log folder %s of a dead process; its messages will be sent.",
                orphan.folder,
                extra={"event": "spill_adopted"},
            )
        else:
            orphan.close()
        return adopted

    # -- syncing

    def dirty(self) -> list[PendingSync]:
        """Return the files that are not synced. The caller syncs them without holding a lock."""
        found = []
        for files in self._lanes.values():
            if files.doubtful:
                files.doubtful = [each for each in files.doubtful if not each.gone]
                found += [PendingSync(each) for each in files.doubtful]
            if files.open is not None and files.open.synced < files.open.size:
                found.append(PendingSync(files.open))
        return found

    def rewrite(self, lane: Lane, poisoned: Segment, unsent: Iterable[BufferedMessage]) -> None:
        """Write the messages of a file that could not be synced to a new file.

        Args:
            lane: The lane of the file.
            poisoned: The file whose sync failed.
            unsent: The messages of the lane that are in memory, in order.

        Raises:
            SpillFailed: The new file cannot be written or synced either.
        """
        files = self._lanes.get(lane.producer)
        if files is None or poisoned.gone:
            return
        if poisoned is not files.open and poisoned not in files.doubtful:
            files.doubtful.append(poisoned)  # it was sealed during the sync
        segment = None
        try:
            messages = _kept(poisoned, files.last_before(poisoned), unsent)
            segment = self.log.create(lane.producer, lane.key, poisoned.header.number)
            for message in messages:
                segment.append(message)
            segment.sync()
            files.put_in_place(poisoned, segment)
        except (OSError, CorruptSegment) as error:
            if segment is not None:
                # The poisoned file still holds these messages. A second copy would send them again later.
                segment.unlink()
            raise SpillFailed(
                f"{poisoned.path} could not be synced, and its messages could not be written to a new file: "
                f"{error}"
            ) from error
        self.bytes += segment.size - poisoned.size
        poisoned.unlink()

    def drop(self, lane: Lane) -> None:
        """Forget the files of a lane after its folder was removed."""
        files = self._lanes.pop(lane.producer, None)
        if files is not None and files.open is not None:
            files.open.seal()

    def forsake(self) -> None:
        """Use a new folder from now on. The caller has dropped all lanes."""
        self.bytes = 0
        self.log.forsake()

    def stored_files(self, lane: Lane) -> int:
        """Return how many sealed files of the lane are on disk only."""
        files = self._lanes.get(lane.producer)
        return 0 if files is None else len(files.stored)

    # -- the end

    def reject(self, lane: Lane, message: BufferedMessage) -> Path:
        """Write a message that the broker refused to the quarantine, as a segment. Return its path.

        Raises:
            OSError: The file cannot be written.
        """
        head, seed = pack_header(FileHeader(lane.producer, 0, lane.key))
        record = pack_record(message, seed)
        return self.log.copy_to_quarantine(f"rejected-{message.sequence}", head + record)

    def close(self) -> None:
        """Close all files. Those with messages stay for the process that adopts them."""
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
        """Close, in a forked child, the inherited descriptors. The files belong to the parent."""
        for files in self._lanes.values():
            if files.open is not None:
                files.open.seal()
        for orphan in set(self._orphans.values()):
            orphan.abandon()
        self._lanes.clear()
        self._orphans.clear()
        self.log.forsake()


def _kept(poisoned: Segment, before: int, unsent: Iterable[BufferedMessage]) -> list[BufferedMessage]:
    """Return the messages of a file whose sync failed. Delivered ones may be missing.

    Raises:
        OSError: The messages are on disk only, and the file cannot be read.
        CorruptSegment: The messages are on disk only, and cannot be read back.
    """
    kept = [each for each in unsent if before < each.sequence <= poisoned.last]
    if kept and kept[-1].sequence == poisoned.last:
        return kept
    # The messages are not in memory, but the page cache may still hold the data that the disk did not write.
    found = poisoned.read()
    if found.problem:
        raise CorruptSegment(f"its messages are on disk only, and cannot be read back: {found.problem}")
    return found.messages
