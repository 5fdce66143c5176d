"""The jobs of a storage as a whole: which there are, and the end of one. Blocking I/O."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from dstl_service.registry.lives import Lives, record_key
from storage.errors import NotFoundError
from storage.object_store import ObjectStore

_DELETED_AT_ONCE = 1000
_BEHIND_SLASH = "0"  # the next character: behind all keys of a folder, before all that follow


@dataclass(frozen=True, slots=True)
class Removal:
    """What was deleted of a job or, unless it `is_written`, would be."""

    job: str
    objects: int
    size_bytes: int
    is_written: bool


def job_names(store: ObjectStore) -> Iterator[str]:
    """Yield the names of all jobs of a storage, as their keys are ordered; asks the store three times for most."""
    after = ""
    while (info := next(iter(store.list("", start_after=after)), None)) is not None:
        name, slash, _ = info.key.partition("/")
        after = f"{name}{_BEHIND_SLASH}" if slash else info.key
        if slash and Lives(store, name).has_job():
            yield name


def has_leftovers(store: ObjectStore, job: str) -> bool:
    """Say whether there is anything below a job's name."""
    return next(iter(store.list(f"{job}/")), None) is not None


def delete_job(store: ObjectStore, job: str, *, life: int | None = None, write: bool = False) -> Removal:
    """
    Delete all objects of a job, its savepoints too, and end its life, so that its name is free. No query of it may run.

    However long this is paused, it deletes nothing of a later job of this name (I11, see
    `dstl_service.registry.lives`): what was listed is deleted only if the life had not ended behind the listing.
    ``job.json`` goes last, so that a deletion which was interrupted can be repeated. What lies there without one is
    deleted, too; who has that done sees to it that no job is created meanwhile.

    Args:
        store: Holds it.
        job: Its name.
        life: The job's; the current one if nobody says.
        write: Do it; without it only count.

    Raises:
        NotFoundError: There is nothing of this name.
    """
    lives = Lives(store, job)
    life = lives.current() if life is None else life
    proof = record_key(job, life)
    try:
        size_bytes, objects = store.head(proof).size_bytes, 1
    except NotFoundError:
        if not has_leftovers(store, job):
            raise
        size_bytes = objects = 0
    others = (info for info in store.list(f"{job}/") if info.key != proof)
    while infos := list(islice(others, _DELETED_AT_ONCE)):
        if write:
            if lives.has_ended(life):
                break
            store.delete([info.key for info in infos])
        objects += len(infos)
        size_bytes += sum(info.size_bytes for info in infos)
    if write:
        lives.end(life)
        store.delete([proof])
    return Removal(job, objects, size_bytes, write)
