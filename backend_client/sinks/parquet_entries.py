"""
Entries of Parquet files: numbered objects in a hidden folder, of which the newest of a slot says what is published.

Older ones are deleted. If that fails, nothing is wrong yet, but the folder grows and openings take longer.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from backend_client.sinks.protocol import Marker
from storage.errors import DstlError, NotFoundError, UnavailableError
from storage.object_store import ObjectStore

HIDDEN = "_dstl"
"""The folder. Readers skip names that begin with an underscore."""
LOOKS = 10
"""How often entries that change meanwhile are looked at again."""
_KEPT_ENTRIES = 16
"""Old entries are deleted in groups of this size: one request per entry would slow every publish down."""

logger = logging.getLogger("backend_client")


class Published(NamedTuple):
    """The number of a slot's newest file, and the marker of what is published: the content of an entry."""

    number: int
    marker: Marker

    def after(self, entry: Published | None) -> Published:
        """
        Return the published state if this is that of a file, and the entry is of before it.

        That may have a later marker: between both was no output, or it was given up, and the file came late.
        """
        if entry is None:
            return self
        of_file, of_entry = self.marker.checkpoint, entry.marker.checkpoint
        is_late = of_entry.branch == of_file.branch and of_entry.id > of_file.id
        return self._replace(marker=entry.marker) if is_late else self

    def to_bytes(self) -> bytes:
        return f"{self.number} {self.marker.to_text()}".encode("ascii")

    @classmethod
    def parse(cls, data: bytes) -> Published:
        """Read the result of `to_bytes`; ValueError for anything else."""
        number, _, marker = data.decode("ascii").partition(" ")
        return cls(int(number), Marker.parse(marker))


class Entries:
    """
    The entries of a slot, of which the newest counts.

    Older ones are deleted. A late put in such a freed place changes nothing, as a newer entry is there.
    """

    def __init__(self, store: ObjectStore, name: str) -> None:
        self._store = store
        self._prefix = f"{HIDDEN}/{name}-"
        self._newest = -1
        self._oldest = 0
        self._has_warned = False

    def read(self) -> Published | None:
        """
        Return the newest entry, None if there is none that can be read.

        Raises:
            UnavailableError: Others add entries faster than they can be read.
        """
        for _ in range(LOOKS):
            texts = (info.key.removeprefix(self._prefix) for info in self._store.list(self._prefix))
            numbers = sorted(int(text) for text in texts if text.isdecimal())
            if not numbers:
                return None
            self._newest = numbers[-1]
            try:
                data = self._store.get(self._key(self._newest))
            except NotFoundError:
                continue  # a newer one has replaced it; files that it tells of may be gone, so they tell too little
            self._delete(numbers[:-1])
            self._oldest = self._newest
            with suppress(ValueError):
                return Published.parse(data)
            return None
        raise self.restless()

    def add(self, published: Published) -> None:
        """Put the next entry; ConflictError if another publisher has put one."""
        self._store.put(self._key(self._newest + 1), published.to_bytes(), if_absent=True)
        self._newest += 1
        if self._newest % _KEPT_ENTRIES == 0:
            # Each one once: a bucket with versions keeps a marker of each deletion, also of what is gone.
            self._delete(range(self._oldest, self._newest))
            self._oldest = self._newest

    def restless(self) -> UnavailableError:
        """Return the error if others add entries all the time."""
        return UnavailableError(f"the entries {self._prefix}* change too fast to be read: other publishers run")

    def _key(self, number: int) -> str:
        return f"{self._prefix}{number:012d}"

    def _delete(self, numbers: Sequence[int]) -> None:
        """Delete entries; if that fails, the next publisher that opens the slot repeats it."""
        if not numbers:
            return
        try:
            self._store.delete([self._key(number) for number in numbers])
        except DstlError as error:
            if not self._has_warned:
                logger.warning(
                    "%d old entries %s* in %s are not deleted: %s. Nothing is lost, but while this lasts each publish "
                    "adds one, and publishing takes longer",
                    len(numbers),
                    self._prefix,
                    self._store.url,
                    error,
                )
            self._has_warned = True
