"""
The lives of a name: a job that is deleted and created again is another job, and shares no key with the one before.

    @lives/<job>/<8 digits>     this life has ended; stays for ever

Lives count from 0. The current one is the first that has not ended; a life begins only after the one before has ended.
Everything that belongs to a life identifies it:

- Its registry - ``job.json``, epochs, manifests, savepoints, hints - lies in a folder of its own (`life_folder`).
- Its epochs have a range of their own (`first_epoch`). So change sets, requests and claims of two lives differ, and
  every epoch comparison treats an owner of an earlier life as an older owner (I4).
- Objects of change sets, snapshots and compactions have random keys, so none is ever written twice.

A process that deletes for a life, however long it was paused, needs to know only that the objects it *listed* below the
name are of no later life. It checks after the listing whether its life has ended: if not, no later one had begun when
it listed (I11). Objects that it puts late lie in a folder that is never read again. Blocking I/O.
"""

from __future__ import annotations

from contextlib import suppress

from dstl_service.formats.tombstone import Tombstone, first_without, past_key, tombstone_key
from storage.errors import ConflictError, CorruptDataError, NotFoundError, UnavailableError
from storage.object_store import ObjectStore, exists, is_readable

EPOCHS_OF_LIFE = 10**7
LIVES_MAX = 10**5
"""The product stays below 10**12: an epoch's number names a branch, see `dstl_service.formats.keys.Place`."""

_AFTER_SLASH = "0"  # the character after "/": sorts after all keys of a folder, before those of the next one


def life_folder(job: str, life: int) -> str:
    """Return the folder of a life's registry; that of the first life is the job's own folder."""
    return f"{job}/lives/{life:08d}" if life else job


def record_key(job: str, life: int) -> str:
    """Return the key of a life's ``job.json``."""
    return f"{life_folder(job, life)}/job.json"


def registry_prefixes(job: str, life: int) -> list[str]:
    """Return the key prefixes of a life's registry, ``job.json`` excepted; they match no other life and no object."""
    folder = life_folder(job, life)
    return [f"{folder}/{part}/" for part in ("checkpoints", "epochs", "hints", "savepoints", "savepoints-made")]


def first_epoch(life: int) -> int:
    """Return the number of a life's first epoch."""
    return life * EPOCHS_OF_LIFE + 1


def life_of(epoch: int) -> int:
    """Return the life to which an epoch belongs."""
    return epoch // EPOCHS_OF_LIFE


class Lives:
    """Finds the current life of a name; caches nothing."""

    def __init__(self, store: ObjectStore, job: str) -> None:
        self._store = store
        self._job = job

    def current(self) -> int:
        """
        Return the number of the current life, whether or not a job was created in it.

        One request for a name that was never deleted, few for any other: lives end in order.

        Raises:
            UnavailableError: The name has used up its lives.
        """
        alive = first_without(self.has_ended)
        if alive >= LIVES_MAX:
            raise UnavailableError(f"job {self._job!r} was deleted {alive} times: choose another name", job=self._job)
        return alive

    def has_ended(self, life: int) -> bool:
        """Return whether a life has ended: nothing of it is valid any more, and another one may have begun."""
        return is_readable(self._store, self._key(life))

    def has_job(self) -> bool:
        """Return whether a job of this name exists now."""
        return exists(self._store, record_key(self._job, self.current()))

    def tombstone(self, life: int) -> Tombstone | None:
        """
        Return the tombstone of the job of a life, or None; its undo may have begun.

        Raises:
            CorruptDataError: The tombstone cannot be read.
        """
        return self.tombstone_of(life, self.tombstone_number(life))

    def tombstone_of(self, life: int, number: int) -> Tombstone | None:
        """Return the tombstone of a number, or None; raises as `tombstone`."""
        return read_tombstone(self._store, tombstone_key(self._job, life, number))

    def tombstone_number(self, life: int) -> int:
        """Return the number of a life's tombstone, or of its next one."""
        return first_without(lambda number: is_readable(self._store, past_key(self._job, life, number)))

    def end(self, life: int) -> None:
        """End a life for good, which frees the name."""
        with suppress(ConflictError):
            self._store.put(self._key(life), b"ended", if_absent=True)

    def check_not_lost(self, life: int) -> None:
        """
        Check, where a life has no ``job.json``, that it never had one; mostly one request.

        A job that began beside the remains of another one would have another uid: those remains could not be read or
        rebuilt, and their objects would be garbage.

        Raises:
            CorruptDataError: There was a job, whose ``job.json`` is lost; or see `check_last`.
        """
        folder, key = life_folder(self._job, life), record_key(self._job, life)
        later = f"{self._job}/lives/"  # below the folder of the first life; `check_last` looks there
        found = (info.key for info in self._store.list(f"{folder}/") if life or not info.key.startswith(later))
        rest = next((one for one in found if "/" in one.removeprefix(f"{folder}/")), None)  # else a probe's
        if rest is None or is_readable(self._store, key) or self.has_ended(life):
            return
        self.check_last(life)  # the rest may be a later life's
        raise CorruptDataError(
            f"{key} is lost, since {rest} exists: stop all services of job {self._job!r}, then bring it back with "
            "`dstl fsck --rebuild`, or delete the rest for good with `dstl delete --now --write`",
            object_key=key,
        )

    def check_last(self, life: int) -> None:
        """
        Check that nothing of a later life is stored, or that this one has ended; mostly one request.

        A job created while end records of lives are missing would share keys with a later life, and its collector would
        take all objects of that life for orphans.

        Raises:
            CorruptDataError: The record that this life has ended is lost.
        """
        folder = f"{self._job}/lives/"
        after = f"{folder}{life:08d}{_AFTER_SLASH}"
        later = next(iter(self._store.list(folder, start_after=after)), None)
        if later is not None and not self.has_ended(life):
            raise CorruptDataError(
                f"{self._key(life)} is lost, for instance because only the folder of job {self._job!r} was copied: "
                f"{later.key} exists, of a later job of this name. Copy everything below @lives/{self._job}/ too, or "
                "run `dstl fsck --rebuild`, which writes it",
                object_key=self._key(life),
            )

    def stored(self) -> int:
        """
        Return the last life that has a registry: normally the current one or an earlier one.

        A later one shows that end records of lives were lost, as after a copy of only the job's own folder. For
        repairs: it lists everything in the lives after the first.
        """
        folder = f"{self._job}/lives/"
        names = (info.key.removeprefix(folder).partition("/")[0] for info in self._store.list(folder))
        return max((int(name) for name in names if name.isascii() and name.isdigit()), default=0)

    def _key(self, life: int) -> str:
        return f"@lives/{self._job}/{life:08d}"


def read_tombstone(store: ObjectStore, key: str) -> Tombstone | None:
    """Return the tombstone of this key, or None; `CorruptDataError` if it cannot be read."""
    try:
        data = store.get(key)
    except NotFoundError:
        return None
    return Tombstone.decode(data, key)


class LifeFolder:
    """
    The registry folder of one life: the life current at the first access, and never another.

    A process must cache and delete within one life; another life needs another instance. With `life` it is that one.
    """

    def __init__(self, store: ObjectStore, job: str, life: int | None = None) -> None:
        self.job = job
        self._lives = Lives(store, job)
        self._life = life

    @property
    def life(self) -> int:
        """The life's number; the first access asks the store."""
        if self._life is None:
            self._life = self._lives.current()
        return self._life

    @property
    def path(self) -> str:
        """The prefix of all keys of the registry."""
        return life_folder(self.job, self.life)

    @property
    def has_ended(self) -> bool:
        """Whether the life has ended since; one request, and none while no life is set."""
        return self._life is not None and self._lives.has_ended(self._life)

    def enter(self, life: int) -> None:
        """
        Bind to this life.

        Raises:
            NotFoundError: The folder is bound to another life: one of the two has ended.
        """
        if self._life not in (None, life):
            raise NotFoundError(
                f"job {self.job!r} was deleted, and its name may be another job's: restart the query", job=self.job
            )
        self._life = life
