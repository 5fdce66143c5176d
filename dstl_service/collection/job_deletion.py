"""Deletes the objects of a job; lists the names of all jobs of a storage. Blocking I/O."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from dstl_service.registry.lives import Lives, record_key, registry_prefixes
from storage.errors import InvalidInputError, NotFoundError
from storage.model import ObjectInfo
from storage.object_store import ObjectStore
from storage.validation import validate_name

_DELETED_AT_ONCE = 1000
_WITH_FENCES = ("/checkpoints/", "/epochs/")
_AFTER_SLASH = "0"  # the character after "/": sorts after all keys of a folder, before all that follow


@dataclass(frozen=True, slots=True)
class Removal:
    """The deleted objects of a job or, unless `is_written`, those that would be."""

    job: str
    objects: int
    size_bytes: int
    is_written: bool


def job_names(store: ObjectStore) -> Iterator[str]:
    """Yield the names of all jobs of a storage, in key order; three requests for most jobs."""
    after = ""
    while (info := next(iter(store.list("", start_after=after)), None)) is not None:
        name, slash, _ = info.key.partition("/")
        after = f"{name}{_AFTER_SLASH}" if slash else info.key
        if slash and _may_name_a_job(name) and Lives(store, name).has_job():
            yield name


def has_leftovers(store: ObjectStore, job: str) -> bool:
    """Return whether any object lies below a job's name."""
    return next(iter(store.list(f"{job}/")), None) is not None


def delete_job(store: ObjectStore, job: str, *, life: int | None = None, write: bool = False) -> Removal:
    """
    Delete all objects of a job, its savepoints too, and end its life, which frees the name.

    The caller has fenced the job's owners, see `dstl_service.collection.tombstones`. Fences stay until the end of the
    life is on record: until then they prevent completing a checkpoint whose objects are gone (I4); from then on no
    batch begins. Manifests stay as long, since they occupy places too. A batch that began before the end and puts its
    manifest after the last step here may be acknowledged; the manifest lies in a folder that is never read again.

    However long it is paused, a deletion removes nothing of a later job of this name (I11, see
    `dstl_service.registry.lives`): listed objects are deleted only if the life had not ended after the listing.
    ``job.json`` is deleted last, so an interrupted deletion can be repeated. Objects below a name without ``job.json``
    are deleted too; the caller then ensures that no job is created meanwhile.

    Args:
        store: Holds the job.
        job: Its name.
        life: The life to delete; None for the current one.
        write: Delete; if false, only count.

    Raises:
        NotFoundError: No object of this name exists.
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
    # Nothing in the folder of an ended life is needed, including objects put there after the listing.
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
    """Return whether a folder may be a job's; the service's own, such as ``@deleted``, are not valid job names."""
    try:
        validate_name("job", folder)
    except InvalidInputError:
        return False
    return True


def _portions(infos: Iterator[ObjectInfo]) -> Iterator[list[ObjectInfo]]:
    while portion := list(islice(infos, _DELETED_AT_ONCE)):
        yield portion
