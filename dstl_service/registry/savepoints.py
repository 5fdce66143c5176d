"""
Savepoints: complete manifests under a name, which keep all objects that they name until they are deleted.

A savepoint is a copy of a checkpoint's manifest, so a table is restored from it as from the checkpoint, even after the
checkpoint was subsumed. Blocking I/O; the service calls it in threads.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from dstl_service.formats.keys import manifest_key
from dstl_service.formats.manifest import (
    Manifest,
    ManifestKind,
    StateView,
    decode_manifest,
    encode_manifest,
    object_keys,
)
from dstl_service.formats.under_way import NOTHING
from dstl_service.registry.known_indexes import KnownIndexes
from dstl_service.registry.lives import LifeFolder
from dstl_service.registry.savepoint_register import SavepointRegister
from storage.errors import ConflictError, CorruptDataError, NotFoundError, UnavailableError
from storage.model import validate_name
from storage.object_store import ObjectStore, exists

_LOOKS_MAX = 5

logger = logging.getLogger("dstl_service")


class SavepointStore:
    """Reads and writes ``savepoints/`` in the folder of a job's life."""

    def __init__(self, store: ObjectStore, folder: LifeFolder) -> None:
        self._store = store
        self._folder = folder
        self._job = folder.job
        self.register = SavepointRegister(store, folder)

    def create(self, name: str, manifest: Manifest, before: StateView | None, call_uid: str) -> Manifest:
        """
        Keep a checkpoint under a name; idempotent for the same checkpoint and name.

        Eleven requests, however many tables there are. They suffice (I11) because every deletion first handles all
        stored manifests that are not needed, then reads the savepoints, then deletes objects that none of them names.
        Here the savepoint is written and put on the register (`dstl_service.registry.savepoint_register`), so that it
        is seen even where listings are stale; then its checkpoint's manifest is looked up. If that still exists, it was
        not deleted before the savepoint was written. So either it is needed, and its objects stay, or the process that
        deletes it reads the savepoints later, and spares them. The objects need no lookup: a manifest is deleted before
        its objects, so all of them exist while it does.

        Args:
            name: See `storage.model.validate_name`.
            manifest: The checkpoint's own.
            before: The state of its base; None for a complete manifest and for a job's first.
            call_uid: Names this call, so that it never deletes another call's savepoint as its own.

        Raises:
            ConflictError: The name is taken by another checkpoint.
            NotFoundError: The checkpoint's manifest is gone: the checkpoint was subsumed meanwhile.
        """
        savepoint = replace(manifest, kind=ManifestKind.COMPLETE, kept_by=call_uid, under_way=NOTHING)
        if before is not None:
            savepoint = replace(savepoint, earlier=tuple(before.log), materializations=before.materializations)
        return self._create(name, savepoint, manifest_key(self._folder.path, manifest.id, manifest.generation))

    def copy(self, name: str, copied: str, call_uid: str) -> Manifest:
        """
        Copy a savepoint under another name; idempotent.

        As in `create`, with the other savepoint in place of the manifest: while it exists, so do its objects.

        Raises:
            NotFoundError: There is no savepoint of this name, or it was deleted meanwhile.
        """
        return self._create(name, replace(self.load(copied), kept_by=call_uid), self._key(copied))

    def _create(self, name: str, savepoint: Manifest, proof_key: str) -> Manifest:
        is_new = self._put(name, savepoint)
        self.register.add(name)
        while not exists(self._store, self._key(name)):  # deleted before it was registered, where it is missing
            is_new = self._put(name, savepoint)
            self.register.add(name)
        try:
            self._store.head(proof_key)
        except NotFoundError as error:
            # An older savepoint may be whole. One that another call took over is that call's: it checks too.
            if is_new and self.load(name).kept_by == savepoint.kept_by:
                self.discard(name)
            raise NotFoundError(
                f"checkpoint {savepoint.id} of job {self._job!r} was subsumed while the savepoint was made; "
                "choose a newer one",
                name=name,
            ) from error
        return savepoint

    def _put(self, name: str, savepoint: Manifest) -> bool:
        """Write a savepoint; return whether there was none of this name."""
        key, data = self._key(validate_name("savepoint", name)), encode_manifest(savepoint)
        for _ in range(_LOOKS_MAX):
            with suppress(ConflictError):
                self._store.put(key, data, if_absent=True)
                return True
            try:
                there = self.load(name)
            except NotFoundError:  # deleted since
                continue
            if there.ref != savepoint.ref:
                raise ConflictError(
                    f"savepoint {name!r} of job {self._job!r} already exists, of checkpoint {there.id}; "
                    "delete it first, or choose another name"
                )
            self._store.put(key, data)  # its maker, if it has yet to look up the manifest, leaves it alone
            return False
        raise UnavailableError(f"savepoint {name!r} of job {self._job!r} is made and deleted all the time; retry")

    def load(self, name: str) -> Manifest:
        """
        Return a savepoint.

        Raises:
            NotFoundError: There is no savepoint of this name.
            CorruptDataError: The savepoint cannot be read.
        """
        key = self._key(validate_name("savepoint", name))
        try:
            return decode_manifest(self._store.get(key), key)
        except NotFoundError as error:
            raise NotFoundError(f"job {self._job!r} has no savepoint {name!r}", job=self._job) from error

    def names(self) -> list[str]:
        """Return the names of all savepoints."""
        prefix = self._prefix
        return [info.key.removeprefix(prefix).removesuffix(".json") for info in self._store.list(prefix)]

    def all(self) -> Iterator[tuple[str, Manifest]]:
        """
        Yield all savepoints by name, as they were at one moment of the call.

        Raises:
            CorruptDataError: A savepoint cannot be read.
            UnavailableError: Savepoints are made and deleted faster than they can be read.
        """
        for _ in range(_LOOKS_MAX):
            # A savepoint that vanished may have been copied under a name that was not listed.
            with suppress(NotFoundError):
                yield from [(name, self.load(name)) for name in self.names()]
                return
        raise UnavailableError(f"savepoints of job {self._job!r} change faster than they can be read; retry")

    def delete(self, name: str) -> None:
        """Delete a savepoint; objects that only it named become orphans. `NotFoundError` if there is none."""
        key = self._key(validate_name("savepoint", name))
        if not exists(self._store, key) and name not in self.register.names():
            raise NotFoundError(f"job {self._job!r} has no savepoint {name!r}", job=self._job)
        self.discard(name)
        # One made meanwhile was deleted with the other, if it was registered before this call deleted.
        while name in self.register.names() and not exists(self._store, key):
            self.discard(name)

    def discard(self, name: str) -> None:
        """Delete a savepoint if it exists, off the register first: a name there without its object stops deletions."""
        self.register.remove(name)
        self._store.delete([self._key(name)])

    def _all_for_deletion(self, *, begin: bool = True) -> list[tuple[str, Manifest]]:
        """
        Return all savepoints by name, including those that no listing shows yet.

        Raises:
            UnavailableError: A savepoint on the register is not found, or not yet: delete nothing.
        """
        missing = ""
        for _ in range(_LOOKS_MAX):
            names = sorted({*self.names(), *self.register.names(begin=begin)})
            try:
                return [(missing := name, self.load(name)) for name in names]
            except NotFoundError:  # deleted since, or copied under a name not listed
                continue
        raise UnavailableError(
            f"savepoint {missing!r} of job {self._job!r} is on the register but not found: if it was just made, retry "
            f"later; if it is lost, `dstl savepoints --delete {missing}` takes it off the register",
            job=self._job,
        )

    def object_keys(self) -> set[str]:
        """
        Return the keys of all objects that savepoints name.

        Raises:
            CorruptDataError: A savepoint cannot be read, so what it names is not known: delete nothing.
        """
        return {key for _, manifest in self._all_for_deletion() for key in object_keys(manifest)}

    def named(self, indexes: KnownIndexes, *, begin: bool = True) -> set[str]:
        """
        Return the keys of all objects that savepoints name, those of their snapshots too.

        A snapshot without its index cannot be restored, so its files are not kept. Such a savepoint was left by a
        process that died before it saw that its checkpoint was gone, or came back with a file system's loss of power.
        It is logged, and keeps the other objects that it names; it must not keep all garbage for ever.

        Args:
            indexes: Reads and caches the indexes of snapshots.
            begin: Whether to create a missing register; see `SavepointRegister.names`.

        Raises:
            UnavailableError: A savepoint on the register is not found, or not yet: delete nothing.
            CorruptDataError: A savepoint, or an index that exists, cannot be read: delete nothing.
        """
        named: set[str] = set()
        for name, manifest in self._all_for_deletion(begin=begin):
            named |= object_keys(manifest)
            for handle in manifest.materializations:
                try:
                    named |= indexes.object_keys_of([handle])
                except CorruptDataError:
                    if exists(self._store, handle.index_key):
                        raise
                else:
                    continue
                logger.error(
                    "a savepoint cannot be restored: delete it",
                    extra={"job": self._job, "savepoint": name, "missing": handle.index_key},
                )
        return named

    @property
    def _prefix(self) -> str:
        return f"{self._folder.path}/savepoints/"

    def _key(self, name: str) -> str:
        return f"{self._prefix}{name}.json"
