"""
Savepoints: complete manifests under a name, which keep all that they name until they are deleted.

A savepoint is a copy of a checkpoint's manifest, so a table is restored from it as from the checkpoint, whether or not
the checkpoint itself was subsumed meanwhile. Blocking I/O; the service calls it in threads.
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
        Keep a checkpoint under a name; the same checkpoint under the same name again changes nothing.

        Eleven requests, however many tables there are. Why they do (I11): whoever deletes goes from manifests - all
        that are stored and not needed - to a look at the savepoints, to objects that none of them names. Here the
        savepoint is written and put on the register (`dstl_service.registry.savepoint_register`), so that it is seen
        wherever listings are old; then its checkpoint's manifest is looked for. If that is still there, it was not
        deleted before the savepoint was written; so either it is needed, and its objects stay, or who deletes it looks
        at the savepoints later, and spares them. The objects need no look: a manifest goes before its objects, so all
        of them are there while it is.

        Args:
            name: See `storage.model.validate_name`.
            manifest: The checkpoint's own.
            before: What its base consists of; None for a complete manifest and for a job's first.
            call_uid: Names this call, so that it takes no other one's savepoint for its own, and deletes that.

        Raises:
            ConflictError: The name is taken by another checkpoint.
            NotFoundError: The checkpoint's manifest is gone: it was subsumed meanwhile.
        """
        savepoint = replace(manifest, kind=ManifestKind.COMPLETE, kept_by=call_uid, under_way=NOTHING)
        if before is not None:
            savepoint = replace(savepoint, earlier=tuple(before.log), materializations=before.materializations)
        return self._create(name, savepoint, manifest_key(self._folder.path, manifest.id, manifest.generation))

    def copy(self, name: str, copied: str, call_uid: str) -> Manifest:
        """
        Keep under another name what a savepoint holds; the same call again changes nothing.

        As in `create`, with the other savepoint in place of the manifest: while it is there, so are its objects.

        Raises:
            NotFoundError: There is none of this name, or it was deleted meanwhile.
        """
        return self._create(name, replace(self.load(copied), kept_by=call_uid), self._key(copied))

    def _create(self, name: str, savepoint: Manifest, proof_key: str) -> Manifest:
        is_new = self._put(name, savepoint)
        self.register.add(name)
        while not exists(self._store, self._key(name)):  # deleted before it was on the register, where it is missed
            is_new = self._put(name, savepoint)
            self.register.add(name)
        try:
            self._store.head(proof_key)
        except NotFoundError as error:
            # One that was there may be whole. So is one that another call took over: it looks for the manifest, too.
            if is_new and self.load(name).kept_by == savepoint.kept_by:
                self.discard(name)
            raise NotFoundError(
                f"checkpoint {savepoint.id} of job {self._job!r} was subsumed while the savepoint was made", name=name
            ) from error
        return savepoint

    def _put(self, name: str, savepoint: Manifest) -> bool:
        """Write a savepoint; say whether there was none of this name."""
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
                    f"savepoint {name!r} of job {self._job!r} exists already, of checkpoint {there.id}; "
                    "delete it first, or choose another name"
                )
            self._store.put(key, data)  # who made it, and has not looked for the manifest yet, leaves it alone
            return False
        raise UnavailableError(f"savepoint {name!r} of job {self._job!r} is made and deleted all the time; ask again")

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
        prefix = self._prefix
        return [info.key.removeprefix(prefix).removesuffix(".json") for info in self._store.list(prefix)]

    def all(self) -> Iterator[tuple[str, Manifest]]:
        """
        Yield all savepoints by name, as they were at one moment of the call.

        Raises:
            CorruptDataError: One cannot be read.
            UnavailableError: They are made and deleted faster than they can be read.
        """
        for _ in range(_LOOKS_MAX):
            # One that vanished may have been copied under a name that was not listed.
            with suppress(NotFoundError):
                yield from [(name, self.load(name)) for name in self.names()]
                return
        raise UnavailableError(f"savepoints of job {self._job!r} change faster than they can be read; ask again")

    def delete(self, name: str) -> None:
        """Delete a savepoint; what only it named becomes an orphan. `NotFoundError` if there is none."""
        key = self._key(validate_name("savepoint", name))
        if not exists(self._store, key) and name not in self.register.names():
            raise NotFoundError(f"job {self._job!r} has no savepoint {name!r}", job=self._job)
        self.discard(name)
        # One that was made meanwhile went with the other one, if it was on the register before this came to delete.
        while name in self.register.names() and not exists(self._store, key):
            self.discard(name)

    def discard(self, name: str) -> None:
        """Delete a savepoint that may be gone already; it goes off the register first, or it would be missed there."""
        self.register.remove(name)
        self._store.delete([self._key(name)])

    def _all_for_deletion(self, *, begin: bool = True) -> list[tuple[str, Manifest]]:
        """
        Return all savepoints by name, also those that no listing shows yet.

        Raises:
            UnavailableError: One on the register cannot be read, or not yet: delete nothing.
        """
        missing = ""
        for _ in range(_LOOKS_MAX):
            names = sorted({*self.names(), *self.register.names(begin=begin)})
            try:
                return [(missing := name, self.load(name)) for name in names]
            except NotFoundError:  # deleted since, or copied under a name that was not seen
                continue
        raise UnavailableError(
            f"savepoint {missing!r} of job {self._job!r} is on the register, and is not found: one that was just made "
            f"is found later; if it is lost, `dstl savepoints --delete {missing}` takes it off the register",
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

        A snapshot whose index is gone can be restored by nobody, so its files are nobody's. Such a savepoint was left
        by a process that died before it saw that its checkpoint was gone, or came back with a file system's loss of
        power. It is reported, and keeps what else it names; it must not keep all garbage for ever.

        Args:
            indexes: Reads the indexes of snapshots, and remembers them.
            begin: Whether the register is begun where there is none; see `SavepointRegister.names`.

        Raises:
            UnavailableError: One cannot be read yet: delete nothing.
            CorruptDataError: A savepoint, or an index that is there, cannot be read: delete nothing.
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
