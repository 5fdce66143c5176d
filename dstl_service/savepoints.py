"""
Savepoints: complete manifests under a name, which keep all that they name until they are deleted.

A savepoint is a copy of a checkpoint's manifest, so a table is restored from it as from the checkpoint, whether or not
the checkpoint itself was subsumed meanwhile. Blocking I/O; the service calls it in threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dstl_service.manifest import Manifest, ManifestKind, StateView, decode_manifest, encode_manifest
from dstl_service.materialization_index import named_by
from dstl_service.registry_format import manifest_key
from dstl_service.retention import object_keys
from dstl_service.under_way import NOTHING
from storage.errors import ConflictError, CorruptDataError, NotFoundError
from storage.model import validate_name
from storage.object_store import ObjectStore


class SavepointStore:
    """Reads and writes ``<base>/<job>/savepoints/``."""

    def __init__(self, store: ObjectStore, job: str) -> None:
        self._store = store
        self._job = job
        self._prefix = f"{job}/savepoints/"

    def create(self, name: str, manifest: Manifest, before: StateView | None) -> Manifest:
        """
        Keep a checkpoint under a name; the same checkpoint under the same name again changes nothing.

        Args:
            name: See `storage.model.validate_name`.
            manifest: The checkpoint's own.
            before: What its base consists of; None for a complete manifest and for a job's first.

        Raises:
            ConflictError: The name is taken by another checkpoint.
            NotFoundError: An object of the checkpoint, or its manifest, is gone: it was subsumed meanwhile.
        """
        validate_name("savepoint", name)
        savepoint = replace(manifest, kind=ManifestKind.COMPLETE, under_way=NOTHING)
        if before is not None:
            savepoint = replace(savepoint, earlier=tuple(before.log), materializations=before.materializations)
        try:
            self._store.put(self._key(name), encode_manifest(savepoint), if_absent=True)
        except ConflictError:
            there = self.load(name)
            if there.ref != manifest.ref:
                raise ConflictError(
                    f"savepoint {name!r} of job {self._job!r} exists already, of checkpoint {there.id}; "
                    "delete it first, or choose another name"
                ) from None
            return there
        # Whoever deletes goes from manifests to a look at the savepoints to objects that none of them names. Here the
        # savepoint is written, then its objects are looked for, then its manifest. If that is still there, it was not
        # deleted before the savepoint was written, so whoever deletes it reads the savepoint and spares its objects.
        # If it is gone, its objects may go at any moment, although all were there just now. (I11)
        try:
            for key in sorted(object_keys(savepoint) | named_by(savepoint.materializations, self._store)):
                self._store.head(key)
            self._store.head(manifest_key(self._job, manifest.id, manifest.generation))
        except (NotFoundError, CorruptDataError) as error:
            self.delete(name)
            raise NotFoundError(
                f"checkpoint {manifest.id} of job {self._job!r} was subsumed while the savepoint was made: {error}"
            ) from error
        return savepoint

    def load(self, name: str) -> Manifest:
        """
        Return a savepoint.

        Raises:
            NotFoundError: There is none of this name.
            CorruptDataError: It cannot be read.
        """
        key = self._key(validate_name("savepoint", name))
        try:
            return decode_manifest(self._store.get(key), key)
        except NotFoundError as error:
            raise NotFoundError(f"job {self._job!r} has no savepoint {name!r}", job=self._job) from error

    def names(self) -> list[str]:
        """Return the names of all savepoints."""
        return [info.key.removeprefix(self._prefix).removesuffix(".json") for info in self._store.list(self._prefix)]

    def all(self) -> Iterator[tuple[str, Manifest]]:
        """Yield all savepoints by name."""
        for name in self.names():
            yield name, self.load(name)

    def delete(self, name: str) -> None:
        """Delete a savepoint; what only it named becomes an orphan. `NotFoundError` if there is none."""
        key = self._key(validate_name("savepoint", name))
        self._store.head(key)
        self._store.delete([key])

    def object_keys(self) -> set[str]:
        """
        Return the keys of all objects that savepoints name.

        Raises:
            CorruptDataError: A savepoint cannot be read, so what it names is not known: delete nothing.
        """
        return {key for _, manifest in self.all() for key in object_keys(manifest)}

    def _key(self, name: str) -> str:
        return f"{self._prefix}{name}.json"
