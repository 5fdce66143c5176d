"""
The lives of a name: a job that is deleted and created anew is another job, and shares no key with the one before.

    @lives/<job>/<8 digits>     this life has ended; stays for ever

Lives count from 0. The current one is the first that has not ended, and nobody can begin a life before the one before
has ended. Whatever belongs to one life says of which it is:

- Its registry - ``job.json``, epochs, manifests, savepoints, hints - lies in a folder of its own (`life_folder`).
- Its epochs are of a range of its own (`first_epoch`). So change sets, requests and claims of two lives differ, and to
  all who go by epochs an owner of an earlier life is an older owner (I4).
- Objects of change sets, snapshots and compactions have keys that are drawn by chance, so none is ever written again.

Who deletes for a life, however long it slept, needs to know only that what it *listed* below the name is of no later
one. It looks behind the listing whether its life has ended: if not, no later one had begun when it listed (I11).
What it puts late lies in a folder that nobody reads any more. Blocking I/O.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from storage.errors import ConflictError, CorruptDataError, NotFoundError, UnavailableError
from storage.object_store import ObjectStore, exists

EPOCHS_OF_LIFE = 10**7
LIVES_MAX = 10**5
"""Together below 10**12: a branch is named by an epoch, see `registry_format.Place`."""

_BEHIND_SLASH = "0"  # the next character: behind all keys of a folder, before those of the next one


def life_folder(job: str, life: int) -> str:
    """Return where a life's registry lies; that of the first is the job's own folder."""
    return f"{job}/lives/{life:08d}" if life else job


def record_key(job: str, life: int) -> str:
    """Return the key of a life's ``job.json``."""
    return f"{life_folder(job, life)}/job.json"


def registry_prefixes(job: str, life: int) -> list[str]:
    """Return what the keys of a life's registry begin with, but for ``job.json``: of no other life, and no objects."""
    folder = life_folder(job, life)
    return [f"{folder}/{part}/" for part in ("checkpoints", "epochs", "hints", "savepoints", "savepoints-made")]


def first_epoch(life: int) -> int:
    """Return the number of a life's first epoch."""
    return life * EPOCHS_OF_LIFE + 1


def life_of(epoch: int) -> int:
    """Return the life to which an epoch belongs."""
    return epoch // EPOCHS_OF_LIFE


class Lives:
    """Knows which life of a name is the current one; keeps nothing in memory."""

    def __init__(self, store: ObjectStore, job: str) -> None:
        self._store = store
        self._job = job

    def current(self) -> int:
        """
        Return the number of the current life, whether or not a job was created in it.

        One request for a name that was never deleted, and few for any: lives end one after the other.

        Raises:
            UnavailableError: The name was used so often that there are no numbers left.
        """
        alive = first_without(self.has_ended)
        if alive >= LIVES_MAX:
            raise UnavailableError(f"job {self._job!r} was deleted {alive} times: choose another name", job=self._job)
        return alive

    def has_ended(self, life: int) -> bool:
        """Say whether a life has ended: nothing of it counts any more, and another one may have begun."""
        return exists(self._store, self._key(life))

    def has_job(self) -> bool:
        """Say whether there is a job of this name now."""
        return exists(self._store, record_key(self._job, self.current()))

    def end(self, life: int) -> None:
        """End a life, for good; the name is free then."""
        with suppress(ConflictError):
            self._store.put(self._key(life), b"ended", if_absent=True)

    def check_last(self, life: int) -> None:
        """
        Return if nothing of a later life is stored, or this one has ended; one request for most.

        A job that is created while ends of lives are missing would share keys with one that they tell of, and its
        collector would take all objects of that one for orphans.

        Raises:
            CorruptDataError: What tells that this life has ended is lost.
        """
        folder = f"{self._job}/lives/"
        behind = f"{folder}{life:08d}{_BEHIND_SLASH}"
        later = next(iter(self._store.list(folder, start_after=behind)), None)
        if later is not None and not self.has_ended(life):
            raise CorruptDataError(
                f"{self._key(life)} is lost, as where only the folder of job {self._job!r} was copied: there is "
                f"{later.key}, of a later job of this name. Copy what lies below @lives/{self._job}/, or have "
                "`dstl fsck --rebuild` write it",
                object_key=self._key(life),
            )

    def stored(self) -> int:
        """
        Return the last life of which there is a registry: the current one, or one before it.

        A later one shows that ends of lives were lost, as where only a job's own folder was copied. For repairs: it
        takes as many requests as a listing of all that lies in later lives.
        """
        folder = f"{self._job}/lives/"
        names = (info.key.removeprefix(folder).partition("/")[0] for info in self._store.list(folder))
        return max((int(name) for name in names if name.isascii() and name.isdigit()), default=0)

    def _key(self, life: int) -> str:
        return f"@lives/{self._job}/{life:08d}"


def first_without(is_past: Callable[[int], bool]) -> int:
    """Return the first number that is not past, of numbers that pass one after the other; asks for few of them."""
    step = 1
    while is_past(step - 1):
        step *= 2
    past, found = step // 2 - 1, step - 1
    while found - past > 1:
        middle = (past + found) // 2
        past, found = (middle, found) if is_past(middle) else (past, middle)
    return found


class LifeFolder:
    """
    Where the registry of one life lies: of the one that is current when it is first asked, and of no other one ever.

    What a process remembers and deletes must be of one life, so who shall see another one makes another folder.
    """

    def __init__(self, store: ObjectStore, job: str) -> None:
        self.job = job
        self._lives = Lives(store, job)
        self._life: int | None = None

    @property
    def life(self) -> int:
        """The life's number; the first look asks the store."""
        if self._life is None:
            self._life = self._lives.current()
        return self._life

    @property
    def path(self) -> str:
        """What all keys of the registry begin with."""
        return life_folder(self.job, self.life)

    @property
    def has_ended(self) -> bool:
        """Say whether the life has ended since; one request, and none while this goes by no life yet."""
        return self._life is not None and self._lives.has_ended(self._life)

    def enter(self, life: int) -> None:
        """
        Go by this life.

        Raises:
            NotFoundError: This is the folder of another one, which has ended.
        """
        if self._life not in (None, life):
            raise NotFoundError(
                f"job {self.job!r} was deleted, and its name is free: start the query anew", job=self.job
            )
        self._life = life
