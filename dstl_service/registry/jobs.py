"""The jobs of a storage as a whole: which there are, and the end of one. Blocking I/O."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from dstl_service.registry.lives import Lives, record_key, registry_prefixes
from storage.errors import InvalidInputError, NotFoundError
from storage.model import ObjectInfo, validate_name
from storage.object_store import ObjectStore

_DELETED_AT_ONCE = 1000
_WITH_FENCES = ("/checkpoints/", "/epochs/")
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
        if slash and _may_name_a_job(name) and Lives(store, name).has_job():
            yield name


def has_leftovers(store: ObjectStore, job: str) -> bool:
    """Say whether there is anything below a job's name."""
    return next(iter(store.list(f"{job}/")), None) is not None


def delete_job(store: ObjectStore, job: str, *, life: int | None = None, write: bool = False) -> Removal:
    """
    Delete all objects of a job, its savepoints too, and end its life, so that its name is free.

    Who calls this has fenced the job's owners, see `dstl_service.collection.tombstones`. Their fences stay until the
    end of the life is on record: until then they keep a checkpoint from being completed whose objects are gone (I4),
    and from then on no batch begins. Manifests stay as long, for they lie at places as well. A batch that began before
    the end, and puts its manifest behind the last step here, may be acknowledged; it lies in a folder that nobody
    reads any more.

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
    fences = tuple(prefix for prefix in registry_prefixes(job, life) if prefix.endswith(_WITH_FENCES))
    others = (info for info in store.list(f"{job}/") if info.key != proof and not info.key.startswith(fences))
    for infos in _portions(others):
        if write:
            if lives.has_ended(life):
                break
            store.delete([info.key for info in infos])
        objects += len(infos)
        size_bytes += sum(info.size_bytes for info in infos)
    if write:
        lives.end(life)
    # What lies in the folder of a life that has ended is nobody's, also what somebody put there since it was listed.
    for prefix in registry_prefixes(job, life) if write else fences:
        for infos in _portions(info for info in store.list(prefix) if info.key != proof):
            if write:
                store.delete([info.key for info in infos])
            objects += len(infos)
            size_bytes += sum(info.size_bytes for info in infos)
    if write:
        store.delete([proof])
    return Removal(job, objects, size_bytes, write)


def _may_name_a_job(folder: str) -> bool:
    """Say whether a folder may be a job's: those of the service's own, such as ``@deleted``, have other names."""
    try:
        validate_name("job", folder)
    except InvalidInputError:
        return False
    return True


def _portions(infos: Iterator[ObjectInfo]) -> Iterator[list[ObjectInfo]]:
    while portion := list(islice(infos, _DELETED_AT_ONCE)):
        yield portion
