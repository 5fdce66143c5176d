"""
Savepoints: complete manifests under a name, which keep all objects that they name until they are deleted.

A savepoint is a copy of a checkpoint's manifest, so a table is restored from it as from the checkpoint, whether or not
the checkpoint itself was subsumed meanwhile.

    savepoints/<name>.json              created if absent; deleted only by a call that was asked to delete it
    savepoints/<name>@<call>-<n>.json   a pin: the same, of a call that is making it, or that died

Blocking I/O; the service calls it in threads.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
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
from dstl_service.wire import CheckpointRef
from storage.errors import ConflictError, CorruptDataError, NotFoundError, UnavailableError
from storage.model import validate_name
from storage.object_store import ObjectStore, exists

_LOOKS_MAX = 5
_PIN = "@"
"""Follows the savepoint's name in that of a pin; no name of a user's has it."""

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

        Fifteen requests, three more for a job's first, however many tables there are. They suffice (I11) because a
        deletion goes from manifests - all that are stored and not needed - to a look at the savepoints, to objects that
        none of them names. This call writes a pin, a savepoint under a name that is never used again, and puts it on
        the register (`dstl_service.registry.savepoint_register`), so that it is seen wherever listings are old. Then it
        looks for the checkpoint's manifest. If that is still there, it was not deleted before the pin was written; so
        either it is needed, and its objects stay, or its deletion looks at the savepoints later, and spares them. The
        objects need no look: a manifest goes before its objects, so all of them are there while it is.

        Only then it creates the savepoint itself, whose name takes the pin's place on the register in one entry. Names
        are used again, so this call never overwrites or deletes what has the name: what it read of that may be old. A
        crash or an unreachable store may leave the pin. It is listed, keeps what it names, and is deleted as any other.

        Args:
            name: See `storage.model.validate_name`.
            manifest: The checkpoint's own.
            before: The state of its base; None for a complete manifest and for a job's first.
            call_uid: Names this call, and its pins.

        Raises:
            ConflictError: The name is taken by another checkpoint.
            NotFoundError: The checkpoint's manifest is gone: it was subsumed meanwhile.
            UnavailableError: It, or its pin, is deleted whenever it is made.
        """
        savepoint = replace(manifest, kind=ManifestKind.COMPLETE, kept_by=call_uid, under_way=NOTHING)
        if before is not None:
            savepoint = replace(savepoint, earlier=tuple(before.log), materializations=before.materializations)
        proof_key = manifest_key(self._folder.path, manifest.id, manifest.generation)
        return self._create(name, savepoint, lambda: exists(self._store, proof_key))

    def copy(self, name: str, copied: str, call_uid: str) -> Manifest:
        """
        Copy a savepoint under another name; idempotent.

        As in `create`, with the other savepoint in place of the manifest: while it is there, so are its objects. Its
        name may be that of another checkpoint by then, so it is read again.

        Raises:
            NotFoundError: There is no savepoint of this name, or it was deleted meanwhile.
        """
        savepoint = replace(self.load(copied), kept_by=call_uid)
        return self._create(name, savepoint, lambda: self._ref_of(copied) == savepoint.ref)

    def _create(self, name: str, savepoint: Manifest, is_whole: Callable[[], bool]) -> Manifest:
        validate_name("savepoint", name)
        for number in range(_LOOKS_MAX):
            if self._make(name, f"{name}{_PIN}{savepoint.kept_by}-{number}", savepoint, is_whole):
                return savepoint
        raise UnavailableError(
            f"savepoint {name!r} of job {self._job!r} is made and deleted all the time; retry", job=self._job
        )

    def _make(self, name: str, pin: str, savepoint: Manifest, is_whole: Callable[[], bool]) -> bool:
        """Make a savepoint; return whether its objects were kept throughout, and it was there at the end."""
        self._store.put(self._key(pin), encode_manifest(savepoint), if_absent=True)
        try:
            self.register.add(pin)
            if not is_whole():
                raise NotFoundError(
                    f"checkpoint {savepoint.id} of job {self._job!r} was subsumed while the savepoint was made; "
                    "choose a newer one",
                    name=name,
                )
            if not self._put(name, savepoint):
                self.discard(pin)
                return False
        except (NotFoundError, ConflictError, CorruptDataError):
            self.discard(pin)
            raise
        # A pin that was deleted as a leftover may have kept nothing since, and a barred one may be of nothing.
        if not self.register.replace(pin, name):
            self.discard(pin)
            return False
        is_made = exists(self._store, self._key(name))
        self._store.delete([self._key(pin)])
        return is_made

    def _put(self, name: str, savepoint: Manifest) -> bool:
        """Create a savepoint's object, unless it is there, of the same checkpoint; return whether it was there."""
        with suppress(ConflictError):
            self._store.put(self._key(name), encode_manifest(savepoint), if_absent=True)
            return True
        there = self._ref_of(name)
        if there is not None and there != savepoint.ref:
            raise ConflictError(
                f"savepoint {name!r} of job {self._job!r} already exists, of checkpoint {there.id}; "
                "delete it first, or choose another name"
            )
        return there is not None

    def _ref_of(self, name: str) -> CheckpointRef | None:
        """Return the checkpoint that a savepoint keeps now, or None if there is none of this name."""
        with suppress(NotFoundError):
            return self.load(name).ref
        return None

    def load(self, name: str) -> Manifest:
        """
        Return a savepoint; never a pin, whose checkpoint may have been subsumed before it was looked for.

        Raises:
            NotFoundError: There is no savepoint of this name.
            CorruptDataError: The savepoint cannot be read.
            InvalidInputError: The name is not allowed, or is that of a pin.
        """
        return self._load(validate_name("savepoint", name))

    def _load(self, name: str) -> Manifest:
        key = self._key(name)
        try:
            return decode_manifest(self._store.get(key), key)
        except NotFoundError as error:
            raise NotFoundError(f"job {self._job!r} has no savepoint {name!r}", job=self._job) from error

    def names(self) -> list[str]:
        """Return the names of all savepoints, and of all pins."""
        prefix = self._prefix
        return [info.key.removeprefix(prefix).removesuffix(".json") for info in self._store.list(prefix)]

    def all(self) -> Iterator[tuple[str, Manifest]]:
        """
        Yield all savepoints and pins by name, as they were at one moment of the call.

        Raises:
            CorruptDataError: A savepoint cannot be read.
            UnavailableError: Savepoints are made and deleted faster than they can be read.
        """
        for _ in range(_LOOKS_MAX):
            # A savepoint that vanished may have been copied under a name that was not listed.
            with suppress(NotFoundError):
                yield from [(name, self._load(name)) for name in self.names()]
                return
        raise self._changing()

    def of(self, ref: CheckpointRef) -> Manifest | None:
        """
        Return a savepoint or a pin of a checkpoint, or None; a damaged one of another checkpoint does not matter.

        Raises:
            CorruptDataError: None was found, and a savepoint cannot be read.
            UnavailableError: None was found, and savepoints are made and deleted faster than they can be read.
        """
        unreadable: CorruptDataError | None = None
        for _ in range(_LOOKS_MAX):
            with suppress(NotFoundError):  # see `all`
                for name in self.names():
                    try:
                        manifest = self._load(name)
                    except CorruptDataError as error:
                        unreadable = error
                        continue
                    if manifest.ref == ref:
                        return manifest
                break
        else:
            raise self._changing()
        if unreadable is not None:
            raise unreadable
        return None

    def delete(self, name: str) -> None:
        """Delete a savepoint or a pin; objects that only it named become orphans. `NotFoundError` if there is none."""
        for part in name.split(_PIN, 1):
            validate_name("savepoint", part)
        key = self._key(name)
        if not exists(self._store, key) and name not in self.register.names():
            raise NotFoundError(f"job {self._job!r} has no savepoint {name!r}", job=self._job)
        while True:
            self.discard(name)
            # A call that met the savepoint before it was deleted puts its name on the register no more: it may die
            # then, and leave the name without an object. Its pin stays, as what it made may be listed later.
            self.register.bar(f"{name}{_PIN}")
            # One made meanwhile was deleted with the other, if it was registered before this call deleted.
            if name not in self.register.names() or exists(self._store, key):
                return

    def discard(self, name: str) -> None:
        """
        Delete a savepoint if it exists, off the register first: a name there without its object stops deletions.

        For names that are never used again: another savepoint that has the name by now is deleted, too.
        """
        self.register.remove(name)
        self._store.delete([self._key(name)])

    def _all_for_deletion(self, *, begin: bool = True) -> list[tuple[str, Manifest]]:
        """
        Return all savepoints by name, including those that no listing shows yet.

        A name on the register without its object is left to a person. No death leaves one: an object is put before its
        name is on the register, and deleted after that is taken off, and of a call that makes a savepoint and one that
        deletes it at the same time, each that lives on takes the name off. So the object was lost or removed by hand,
        or this host's answer is old. An old answer must not take a savepoint, or the pin of a call
        that died, off the register: what that made may be listed later. A lost file may be brought back from a copy,
        and is whole as long as its objects are there.

        Raises:
            UnavailableError: A savepoint on the register is not found, or not yet: delete nothing.
        """
        missing = ""
        for _ in range(_LOOKS_MAX):
            names = sorted({*self.names(), *self.register.names(begin=begin)})
            try:
                return [(missing := name, self._load(name)) for name in names]
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

    def _changing(self) -> UnavailableError:
        return UnavailableError(f"savepoints of job {self._job!r} change faster than they can be read; retry")

    @property
    def _prefix(self) -> str:
        return f"{self._folder.path}/savepoints/"

    def _key(self, name: str) -> str:
        return f"{self._prefix}{name}.json"
