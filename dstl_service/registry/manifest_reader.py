"""
Reads a job's manifests one by one and along their chains, and caches them: manifests never change.

Blocking I/O; the service calls it in threads.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator

from dstl_service.formats.keys import Place, manifest_key
from dstl_service.formats.manifest import Manifest, ManifestKind, StateView, state_up_to, with_segments
from dstl_service.registry.lives import LifeFolder
from dstl_service.registry.manifest_log import ManifestLog
from dstl_service.registry.savepoints import SavepointStore
from dstl_service.wire import CheckpointRef
from storage.errors import CorruptDataError, NotFoundError
from storage.object_store import ObjectStore, is_readable

_VIEWS_CACHED = 4
_BASES_KNOWN = 50_000  # seven hours at two checkpoints a second, in some megabytes


class ManifestReader:
    """Reads the manifests and savepoints of one life of a job."""

    def __init__(self, store: ObjectStore, job: str) -> None:
        self._store = store
        self._job = job
        self._lock = threading.Lock()
        self._folder = LifeFolder(store, job)
        self._log = ManifestLog(store, self._folder)
        self._views: OrderedDict[CheckpointRef, StateView] = OrderedDict()
        self._bases: OrderedDict[CheckpointRef, CheckpointRef | None] = OrderedDict()
        self.savepoints = SavepointStore(store, self._folder)
        self.job_uid = ""

    def forget(self) -> None:
        """Clear all caches; stored manifests are read again when needed."""
        self._log.forget()
        with self._lock:
            self._views.clear()
            self._bases.clear()

    def load(self, checkpoint_id: int, generation: int) -> Manifest:
        """
        Return one manifest, from the cache if it is there: manifests never change.

        Raises:
            NotFoundError: There is no manifest at this place.
            CorruptDataError: The manifest cannot be read, or belongs to another job.
        """
        manifest = self._log.load(Place.of(checkpoint_id, generation))
        if self.job_uid and manifest.job_uid != self.job_uid:
            raise CorruptDataError(
                f"manifest {manifest.ref.to_text()} of job {self._job!r} is of a job of uid {manifest.job_uid}, not "
                f"{self.job_uid}; `dstl fsck` names its object",
                job=self._job,
            )
        self._know(manifest)
        return manifest

    def remembered(self, ref: CheckpointRef) -> Manifest | None:
        """Return the manifest that `ref` names if it is cached. Never blocks."""
        manifest = self._log.remembered(Place.of(ref.id, ref.generation))
        return manifest if manifest is not None and manifest.ref == ref else None

    def resolve(self, ref: CheckpointRef) -> Manifest:
        """
        Return the manifest that `ref` names.

        Raises:
            NotFoundError: There is none, or its place holds a fence or a checkpoint with another uid.
        """
        manifest = self.load(ref.id, ref.generation)
        if manifest.uid != ref.uid:
            manifest = self._log.load_anew(Place.of(ref.id, ref.generation))
        if manifest.uid != ref.uid or manifest.is_fence:
            raise NotFoundError(f"job {self._job!r} has no checkpoint {ref.to_text()}", job=self._job)
        return manifest

    def chain(self, ref: CheckpointRef) -> Iterator[Manifest]:
        """
        Yield the manifests from `ref` back to the job's first checkpoint, newest first, one read each.

        Raises:
            NotFoundError: The next one was subsumed and deleted, or never existed.
        """
        try:
            manifest = self.resolve(ref)
        except NotFoundError:
            savepoint = self.savepoints.of(ref)
            if savepoint is None:
                raise
            manifest = savepoint
        yield manifest
        while manifest.base is not None:
            manifest = self.resolve(manifest.base)
            yield manifest

    def stored_chain(self, ref: CheckpointRef) -> Iterator[Manifest]:
        """Yield the manifests from `ref` back to the oldest that is stored, newest first."""
        try:
            yield from self.chain(ref)
        except NotFoundError:
            return

    def state(self, ref: CheckpointRef) -> StateView:
        """
        Return everything a checkpoint's state consists of; in a running job built on the previous checkpoint's view.

        Raises:
            NotFoundError: The checkpoint does not exist.
            CorruptDataError: Its chain cannot be read back to a complete manifest.
        """
        newest_first: list[Manifest] = []
        view: StateView | None = None
        for manifest in self.stored_chain(ref):
            with self._lock:
                view = self._views.get(manifest.ref)
            if view is not None:
                break
            newest_first.append(manifest)
            if manifest.kind is ManifestKind.COMPLETE:
                break
        if view is None and not newest_first:
            raise NotFoundError(f"job {self._job!r} has no checkpoint {ref.to_text()}", job=self._job)
        view = state_up_to(newest_first) if view is None else with_segments(view, newest_first)
        with self._lock:
            self._views[ref] = view
            while len(self._views) > _VIEWS_CACHED:
                self._views.popitem(last=False)
        return view

    def is_stored(self, ref: CheckpointRef) -> bool:
        """Return whether a manifest still exists in the store, whatever is cached."""
        return is_readable(self._store, manifest_key(self._folder.path, ref.id, ref.generation))

    def ancestors(self, ref: CheckpointRef) -> Iterator[CheckpointRef]:
        """
        Yield a checkpoint and those before it, newest first, also those whose manifests are deleted.

        Raises:
            NotFoundError: The next one is unknown: a manifest is deleted, and this process never read it.
        """
        step: CheckpointRef | None = ref
        while step is not None:
            yield step
            with self._lock:
                known, before = step in self._bases, self._bases.get(step)
            step = before if known else self.resolve(step).base

    def is_ancestor(self, older: CheckpointRef, ref: CheckpointRef) -> bool:
        """
        Return whether `older` is on the chain from `ref` back to the first checkpoint; true if they are the same.

        Raises:
            NotFoundError: As `ancestors`.
        """
        return next((step == older for step in self.ancestors(ref) if step.id <= older.id), False)

    def _know(self, manifest: Manifest) -> None:
        if manifest.is_fence:
            return
        with self._lock:
            self._bases[manifest.ref] = manifest.base
            while len(self._bases) > _BASES_KNOWN:
                self._bases.popitem(last=False)
