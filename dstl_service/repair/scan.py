"""
Reads a job's whole registry - ``job.json``, epochs and manifests - as far as it is readable.

`JobStore` reads what it needs and stops at the first damage; this module reads everything and collects the problems,
for verification and rebuilds. `read_registry` does blocking I/O; `Registry` does none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from dstl_service.formats.keys import EpochRecord, Place, decode_job, epoch_key, manifest_key, number_of, place_of
from dstl_service.formats.manifest import Manifest, decode_manifest
from dstl_service.registry.lives import Lives, first_epoch, life_folder, record_key
from dstl_service.wire import ForkOrigin
from storage.errors import CorruptDataError, NewerFormatError, NotFoundError
from storage.object_store import ObjectStore


@dataclass(slots=True)
class Registry:
    """
    The readable part of a job's registry.

    Args:
        job: Name of the job.
        life: The life of the name that was read: the current one, or the last that is stored if the current one has no
            job, for instance because end records of lives were lost.
        ended: How many lives are known to have ended.
        uid: The job's uid, or None if ``job.json`` is missing or damaged.
        max_parallelism: Likewise.
        origin: Where the job began, if it is a fork; likewise.
        epochs: Numbers of all readable epoch records, ascending.
        manifests: All readable manifests by place (id, generation), fences too.
        savepoints: All readable savepoints by name.
        damaged: Keys of objects that cannot be read, with the reason.
        damaged_savepoints: Likewise; only their deletion repairs them, which the user decides.
    """

    job: str
    life: int = 0
    ended: int = 0
    uid: str | None = None
    max_parallelism: int | None = None
    origin: ForkOrigin | None = None
    epochs: list[int] = field(default_factory=list)
    manifests: dict[tuple[int, int], Manifest] = field(default_factory=dict)
    savepoints: dict[str, Manifest] = field(default_factory=dict)
    damaged: dict[str, str] = field(default_factory=dict)
    damaged_savepoints: dict[str, str] = field(default_factory=dict)

    @property
    def folder(self) -> str:
        """Its folder."""
        return life_folder(self.job, self.life)

    @property
    def record_key(self) -> str:
        """The key of ``job.json``."""
        return record_key(self.job, self.life)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is stored, readable or not."""
        return self.uid is None and not (self.epochs or self.manifests or self.savepoints or self.damaged)

    @property
    def checkpoints(self) -> list[Manifest]:
        """All manifests but fences, by place."""
        return [self.manifests[place] for place in sorted(self.manifests) if not self.manifests[place].is_fence]

    @property
    def newest(self) -> Manifest | None:
        """The newest checkpoint."""
        return max(self.checkpoints, key=lambda one: Place.of(one.id, one.generation), default=None)

    @property
    def kept(self) -> list[Manifest]:
        """The savepoints that are checkpoints of the job: not a hold that its fork made again, of the fork's own."""
        found = self.savepoints.values()
        return [one for one in found if one.forked_from is None or one.forked_from.job != self.job]

    @property
    def epoch_max(self) -> int:
        """The highest epoch of any record or manifest; 0 if there is none."""
        return max((*self.epochs, *(manifest.epoch for manifest in self.manifests.values())), default=0)

    def chain(self, manifest: Manifest) -> Iterator[Manifest]:
        """
        Yield the manifest and its stored predecessors, newest first.

        Raises:
            CorruptDataError: One is missing before a complete one was reached, so the state is unknown.
        """
        is_known = False
        step: Manifest | None = manifest
        while step is not None:
            yield step
            is_known = is_known or step.starts_chain
            base, step = step.base, None
            if base is not None:
                found = self.manifests.get((base.id, base.generation))
                if found is not None and found.uid == base.uid and not found.is_fence:
                    step = found
                elif not is_known:
                    key = manifest_key(self.folder, base.id, base.generation)
                    raise CorruptDataError(f"manifest {key} is missing, which the newest checkpoint builds on")

    def problems(self) -> list[str]:
        """Return the problems, each with the object's name; empty for a sound registry."""
        found = list(self.damaged.values())
        if self.life > self.ended:
            found.append(f"below @lives/{self.job}/ end records of lives up to {self.life - 1} are missing")
        if self.uid is None and self.record_key not in self.damaged:
            found.append(f"{self.record_key} is missing")
        in_manifests = max((manifest.epoch for manifest in self.manifests.values()), default=0)
        if in_manifests > max(self.epochs, default=first_epoch(self.life) - 1):  # of which a fork's first manifest is
            found.append(f"{epoch_key(self.folder, in_manifests)} is missing: a manifest is of this epoch")
        if self.newest is not None:
            try:
                for _ in self.chain(self.newest):
                    pass
            except CorruptDataError as error:
                found.append(error.message)
        return found


def read_registry(store: ObjectStore, job: str, life_min: int = 0) -> Registry:
    """
    Read all of a job's registry.

    Args:
        store: Holds the job.
        job: Its name.
        life_min: The last life known from other objects.

    Raises:
        NewerFormatError: A newer version wrote ``job.json``, a manifest or a savepoint: nothing is damaged.
        UnavailableError: The store does not answer.
    """
    lives = Lives(store, job)
    ended = lives.current()
    registry = Registry(job, ended if lives.has_job() else max(ended, lives.stored(), life_min), ended)
    folder, key = registry.folder, registry.record_key
    try:
        registry.uid, registry.max_parallelism, registry.origin = decode_job(store.get(key), key)
    except NotFoundError:
        pass
    except CorruptDataError as error:
        registry.damaged[key] = damage(error)
    for key, data in _objects(store, f"{folder}/epochs/"):
        try:
            EpochRecord.decode(data, key)
            registry.epochs.append(number_of(key))
        except CorruptDataError as error:
            registry.damaged[key] = damage(error)
    for key, data in _objects(store, f"{folder}/checkpoints/"):
        try:
            manifest = decode_manifest(data, key)
            there = place_of(key)
            place = there.id, there.generation
            _check_belongs(manifest, place, registry.uid, key)
        except CorruptDataError as error:
            registry.damaged[key] = damage(error)
        else:
            registry.manifests[place] = manifest
    for key, data in _objects(store, f"{folder}/savepoints/"):
        try:
            manifest = decode_manifest(data, key)
            _check_belongs(manifest, (manifest.id, manifest.generation), registry.uid, key)
        except CorruptDataError as error:
            registry.damaged_savepoints[key] = damage(error)
        else:
            registry.savepoints[key.rsplit("/", 1)[1].removesuffix(".json")] = manifest
    return registry


def _objects(store: ObjectStore, prefix: str) -> Iterator[tuple[str, bytes]]:
    for info in store.list(prefix):
        with suppress(NotFoundError):  # deleted since it was listed
            yield info.key, store.get(info.key)


def _check_belongs(manifest: Manifest, place: tuple[int, int], uid: str | None, key: str) -> None:
    if (manifest.id, manifest.generation) != place:
        raise CorruptDataError(f"manifest {key} is a copy of {manifest.ref.to_text()}", object_key=key)
    if uid is not None and manifest.job_uid != uid:
        raise CorruptDataError(
            f"manifest {key} is of another job, with uid {manifest.job_uid}, not {uid}", object_key=key
        )


def damage(error: CorruptDataError) -> str:
    """Return what is damaged; raise the error if nothing is, since a newer version wrote the object."""
    if isinstance(error, NewerFormatError):
        raise error
    return error.message
