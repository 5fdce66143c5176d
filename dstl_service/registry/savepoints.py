"""
Savepoints: complete manifests under a name, which keep all objects that they name until they are deleted.

A savepoint is a copy of a checkpoint's manifest, so a table is restored from it as from the checkpoint, whether or not
the checkpoint itself was subsumed meanwhile.

    savepoints/<name>@<call>.json   a savepoint, if the register says so; else a pin: of a call that makes it, or died
    savepoints/<name>.json          a savepoint of an earlier version

Each call that makes a savepoint writes an object of its own, once. The register (`registry.savepoint_register`) says
which of them has the name. A deletion takes the object off the register first, and then deletes that object, which is
never written again: so a call that is paused there for any time deletes no other savepoint.

Blocking I/O; the service calls it in threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from dstl_service.formats.keys import manifest_key
from dstl_service.formats.manifest import (
    Manifest,
    ManifestKind,
    StateView,
    decode_manifest,
    encode_manifest,
)
from dstl_service.formats.under_way import NOTHING
from dstl_service.registry.named_objects import LOOKS_MAX, KeptSavepoints, SavepointInfo
from dstl_service.registry.savepoint_register import PIN, savepoint_objects
from dstl_service.wire import CheckpointRef
from storage.errors import ConflictError, CorruptDataError, NotFoundError, UnavailableError
from storage.validation import validate_name

_T = TypeVar("_T")


class SavepointStore(KeptSavepoints):
    """Reads and writes ``savepoints/`` in the folder of a job's life."""

    def create(
        self, name: str, manifest: Manifest, before: StateView | None, call_uid: str, held_for: str = ""
    ) -> Manifest:
        """
        Keep a checkpoint under a name; idempotent for the same checkpoint and name.

        Fourteen requests, eight more for a job's first, however many tables there are. They suffice (I11) because a
        deletion goes from manifests - all that are stored and not needed - to a look at the savepoints, to objects that
        none of them names. This call writes a pin, and puts it on the register, so that it is seen wherever listings
        are old. Then it reads the checkpoint's manifest. If that is still there, it was not deleted before the pin was
        written; so either it is needed, and its objects stay, or its deletion looks at the savepoints later, and spares
        them. The objects need no look: a manifest goes before its objects, so all of them are there while it is.

        Only then one entry of the register makes the pin the savepoint of its name, unless the name is taken by then.
        A crash or an unreachable store may leave the pin. It is listed, keeps what it names, and is deleted as any
        other.

        Args:
            name: See `storage.validation.validate_name`.
            manifest: The checkpoint's own.
            before: The state of its base; None for a complete manifest and for a job's first.
            call_uid: Names this call, and its pin; 32 characters of [0-9a-f].
            held_for: The fork that needs it; see `dstl_service.registry.forks`.

        Returns:
            What has the name: it may have been made by an earlier call.

        Raises:
            ConflictError: The name is taken by another checkpoint.
            NotFoundError: The checkpoint's manifest is gone: it was subsumed meanwhile.
            UnavailableError: The pin was deleted while this call ran.
        """
        savepoint = replace(
            manifest, kind=ManifestKind.COMPLETE, kept_by=call_uid, under_way=NOTHING, held_for=held_for
        )
        if before is not None:
            savepoint = replace(savepoint, earlier=tuple(before.log), materializations=before.materializations)
        key = manifest_key(self._folder.path, manifest.id, manifest.generation)
        return self._create(name, savepoint, lambda: decode_manifest(self._store.get(key), key).uid == manifest.uid)

    def copy(self, name: str, copied: str, call_uid: str, held_for: str = "") -> Manifest:
        """
        Copy a savepoint under another name; idempotent.

        As in `create`, with the other savepoint in place of the manifest: while it is there, so are its objects. Its
        name may be that of another one by then, so it is looked up again.

        Raises:
            NotFoundError: There is no savepoint of this name, or it was deleted meanwhile.
        """
        found = self._find(copied)
        made = replace(found[1], kept_by=call_uid, held_for=held_for)
        return self._create(name, made, lambda: self._find(copied) == found)

    def add_hold(self, name: str, named: Manifest, call_uid: str, held_for: str) -> None:
        """Keep what a manifest names that is no checkpoint of this job: a fork needs it."""
        made = replace(named, kind=ManifestKind.COMPLETE, kept_by=call_uid, under_way=NOTHING, held_for=held_for)
        self._create(name, made, lambda: True)

    def _create(self, name: str, savepoint: Manifest, is_whole: Callable[[], bool]) -> Manifest:
        with suppress(NotFoundError):
            return self._same(name, self._find(name)[1], savepoint)
        pin = f"{name}{PIN}{savepoint.kept_by}"
        self._store.put(self._key(pin), encode_manifest(savepoint), if_absent=True)
        try:
            self.register.add(pin)
            self._check_whole(name, savepoint, is_whole)
            is_made = self.register.publish(pin, lambda there: self._check_same(name, there, savepoint))
        except (NotFoundError, ConflictError, CorruptDataError):
            self.discard(pin)
            raise
        if not is_made:
            self._store.delete([self._key(pin)])
        return savepoint

    def _check_whole(self, name: str, savepoint: Manifest, is_whole: Callable[[], bool]) -> None:
        with suppress(NotFoundError):
            if is_whole():
                return
        raise NotFoundError(
            f"checkpoint {savepoint.id} of job {self._job!r} was subsumed while the savepoint was made; "
            "choose a newer one",
            name=name,
        )

    def _same(self, name: str, there: Manifest, wanted: Manifest) -> Manifest:
        """Return the savepoint that has a name if it is of the wanted one's checkpoint; else raise `ConflictError`."""
        if there.ref == wanted.ref:
            return there
        raise ConflictError(
            f"savepoint {name!r} of job {self._job!r} already exists, of checkpoint {there.id}; "
            "delete it first, or choose another name"
        )

    def _check_same(self, name: str, there: str, wanted: Manifest) -> None:
        try:
            self._same(name, self._load(there), wanted)
        except NotFoundError as error:
            raise ConflictError(
                f"savepoint {name!r} of job {self._job!r} is on the register but not found; "
                "delete it first, or choose another name"
            ) from error

    def load(self, name: str) -> Manifest:
        """
        Return a savepoint; never a pin, whose checkpoint may have been subsumed before it was looked for.

        Raises:
            NotFoundError: There is no savepoint of this name.
            CorruptDataError: The savepoint, or the register, cannot be read.
            InvalidInputError: The name is not allowed, or is that of a pin.
        """
        return self._find(name, begin=False)[1]

    def _find(self, name: str, *, begin: bool = True) -> tuple[str, Manifest]:
        """Return the object that is the savepoint of a name, and what it says."""
        there = self.register.read(begin=begin).object_of(validate_name("savepoint", name)) or name
        try:
            return there, self._load(there)
        except NotFoundError as error:
            raise self._unknown(name) from error

    def _unknown(self, name: str) -> NotFoundError:
        return NotFoundError(
            f"job {self._job!r} has no savepoint {name!r}; `dstl savepoints` lists those it has", job=self._job
        )

    def names(self, prefix: str = "") -> list[str]:
        """Return the names of all savepoints, and of all pins, that begin with `prefix`."""
        return [title for title, _ in self._listed(prefix)]

    def _listed(self, prefix: str = "") -> list[tuple[str, str]]:
        """Return all savepoints and pins that are listed: what people call them, and their objects."""
        listed = savepoint_objects(self._store, self._folder, prefix)
        now = self.register.read(begin=False)
        return sorted((now.title(one), one) for one in listed)

    def all(self) -> Iterator[tuple[str, Manifest]]:
        """Yield all savepoints and pins by name, at once in memory; raises as `infos`."""
        return self._each(self._load)

    def infos(self) -> Iterator[tuple[str, SavepointInfo]]:
        """
        Yield what listings show of all savepoints and pins, by name, as they were at one moment of the call.

        Raises:
            CorruptDataError: A savepoint, or the register, cannot be read.
            UnavailableError: Savepoints are made and deleted faster than they can be read.
        """
        return self._each(self._info_of)

    def _each(self, read: Callable[[str], _T]) -> Iterator[tuple[str, _T]]:
        for _ in range(LOOKS_MAX):
            # A savepoint that vanished may have been copied under a name that was not listed.
            with suppress(NotFoundError):
                yield from [(title, read(one)) for title, one in self._listed()]
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
        for _ in range(LOOKS_MAX):
            with suppress(NotFoundError):  # see `all`
                for one in savepoint_objects(self._store, self._folder):
                    try:
                        if self._info_of(one).checkpoint.ref == ref:
                            return self._load(one)
                    except CorruptDataError as error:
                        unreadable = error
                break
        else:
            raise self._changing()
        if unreadable is not None:
            raise unreadable
        return None

    def delete(self, name: str) -> None:
        """
        Delete a savepoint or a pin; objects that only it named become orphans.

        It leaves the register first: a name there without its object stops deletions. A process that dies after that
        leaves a pin, which the same call deletes when it is repeated.

        Raises:
            NotFoundError: There is none.
        """
        for part in name.split(PIN, 1):
            validate_name("savepoint", part)
        objects = self.register.remove(name)
        if not objects:
            raise self._unknown(name)
        self._store.delete([self._key(one) for one in sorted(objects)])

    def discard(self, name: str) -> None:
        """Delete a savepoint or a pin if it exists."""
        with suppress(NotFoundError):
            self.delete(name)

    def discard_object(self, one: str) -> None:
        """Delete an object, which may have become a savepoint, or have lost its name, since it was listed."""
        self.register.take_off(one)
        self._store.delete([self._key(one)])

    def _changing(self) -> UnavailableError:
        return UnavailableError(f"savepoints of job {self._job!r} change faster than they can be read; retry")
