"""
A job's epochs: ownership, decided by create-if-absent of the next number.

The number of requests does not grow with the number of epochs: a hint tells roughly where they end. A listing alone
never decides where they end, since a mounted file system may serve a stale one: the next number is always read.
Blocking I/O.
"""

from __future__ import annotations

from dstl_service.formats.keys import EpochRecord, epoch_key, epoch_prefix, number_of
from dstl_service.registry.hints import read_hint, write_hint
from dstl_service.registry.lives import EPOCHS_OF_LIFE, LifeFolder, first_epoch, life_of
from storage.errors import ConflictError, NotFoundError, UnavailableError
from storage.object_store import ObjectStore

_HINT = "epoch"


class EpochStore:
    """Reads and writes ``epochs/`` in the folder of a job's life."""

    def __init__(self, store: ObjectStore, folder: LifeFolder) -> None:
        self._store = store
        self._folder = folder
        self._seen = 0

    def newest(self) -> EpochRecord | None:
        """
        Return the newest epoch's record, or None.

        Raises:
            CorruptDataError: The record cannot be read.
        """
        number = self._last_listed()
        newest = self.load(number) if number else None
        while (following := self._find(newest.epoch + 1 if newest else self.first)) is not None:
            newest = following
        self._seen = newest.epoch if newest else 0
        return newest

    @property
    def first(self) -> int:
        """The number of the life's first epoch, begun or not."""
        return first_epoch(self._folder.life)

    def load(self, epoch: int) -> EpochRecord:
        """Return an epoch's record; `NotFoundError` if there is none."""
        key = epoch_key(self._folder.path, epoch)
        return EpochRecord.decode(self._store.get(key), key)

    def begin(self, record: EpochRecord) -> bool:
        """
        Begin an epoch; return whether this call created it, and no other caller was quicker.

        Raises:
            UnavailableError: The job's life has used up its epochs.
        """
        if life_of(record.epoch) != self._folder.life:
            raise UnavailableError(
                f"job {self._folder.job!r} was taken over {EPOCHS_OF_LIFE} times, the maximum: use another name",
                job=self._folder.job,
            )
        try:
            self._store.put(epoch_key(self._folder.path, record.epoch), record.encode(), if_absent=True)
        except ConflictError:
            return False
        write_hint(self._store, self._folder.path, _HINT, record.epoch)
        return True

    def newer_than(self, epoch: int) -> int | None:
        """
        Return a newer epoch that has begun, or None; one request if there is one, else two.

        Epochs begin one after the other, but a rebuild leaves a gap where records were lost. So neither the next number
        alone decides, nor a listing, which may be old. None in a life that has ended, whose records are deleted:
        nothing that its owners write or delete is another life's (`dstl_service.registry.lives`).
        """
        if self._find(epoch + 1) is not None:
            return epoch + 1
        return self._listed(epoch + 1) or None

    def _find(self, epoch: int) -> EpochRecord | None:
        try:
            return self.load(epoch)
        except NotFoundError:
            return None

    def _last_listed(self) -> int:
        """Return the highest number that a listing shows, starting at the hint; 0 if there is none."""
        seen = self._seen or max(read_hint(self._store, self._folder.path, _HINT), default=0)
        listed = self._listed(seen) if seen > 0 else 0
        return listed or self._listed(0)  # the hint of a deleted job may exceed the newest epoch

    def _listed(self, first: int) -> int:
        after = epoch_key(self._folder.path, first - 1) if first > 0 else ""
        infos = self._store.list(epoch_prefix(self._folder.path), start_after=after)
        return max((number_of(info.key) for info in infos), default=0)
