"""
The register of a job's savepoints: their names, for every deletion, even where listings are stale.

    savepoints-made/<20 digits>.claim   decides the content of this number's entry; put if absent
    savepoints-made/<20 digits>.json    the entry: all names after this change; empty until it is filled

A mounted file system may serve listings, and answers that a name does not exist, from its cache. It never caches the
content of an existing object, even of a replaced one, nor the result of a put that creates. So a reader reads only
objects that exist: each number's object exists, empty, before the number before it is filled. It is overwritten once,
with the content of its claim, which every finder of the claim may do. A filled entry never changes again, however late
the same content is put again. See ``docs/decisions/0023-savepoints-on-cached-listings.md``. Blocking I/O.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import suppress

from dstl_service.registry.hints import read_hint, write_hint
from dstl_service.registry.lives import LifeFolder
from storage.errors import ConflictError, CorruptDataError, NotFoundError, UnavailableError
from storage.object_store import ObjectStore, exists
from storage.stored_json import parse_json

_HINT = "savepoints"
_EMPTY = b"{}"
_BARRED = "!"
"""Follows a name that `replace` no longer finds; no name ends with it."""
_Names = frozenset[str]


class SavepointRegister:
    """Knows the names of one life's savepoints, as far as they were made with a register; thread-safe."""

    def __init__(self, store: ObjectStore, folder: LifeFolder) -> None:
        self._store = store
        self._folder = folder
        self._lock = threading.Lock()
        self._next: int | None = None
        self._names: _Names = frozenset()

    def names(self, *, begin: bool = True) -> _Names:
        """
        Return the names on the register now; one request after the process's first call.

        Args:
            begin: Create the register of a job that has none. Required before a deletion, since the answer that there
                is none may be stale. If false, nothing is written.

        Raises:
            CorruptDataError: An entry cannot be read: delete nothing.
        """
        with self._lock:
            return frozenset(name.removesuffix(_BARRED) for name in self._look(begin=begin)[1])

    def add(self, name: str) -> None:
        """Put a name on the register; every read that starts after this call sees it."""
        self._change(lambda names: names | {name})

    def remove(self, name: str) -> None:
        """
        Take a name off the register, if it is there.

        It makes an entry in any case. The next number may have the claim of a call that was adding the name and died;
        filled later, it would put the name on the register after its savepoint is gone.
        """
        self._change(lambda names: names - {name, f"{name}{_BARRED}"}, always=True)

    def bar(self, prefix: str) -> None:
        """Let no name with this prefix be replaced any more; they stay on the register."""
        self._change(
            lambda names: frozenset(
                f"{name}{_BARRED}" if name.startswith(prefix) and not name.endswith(_BARRED) else name for name in names
            )
        )

    def replace(self, name: str, other: str) -> bool:
        """
        Put a name on the register in place of another one, in one entry.

        Returns:
            Whether the first one was there until then, and not barred. If it was not, nothing is changed.
        """
        return self._change(lambda names: names - {name} | {other} if name in names else names)

    def _change(self, change: Callable[[_Names], _Names], *, always: bool = False) -> bool:
        """Make an entry of what is to be changed, if anything is, or always; return whether it made one."""
        with self._lock:
            while True:
                number, names = self._look(begin=True)
                wanted = change(names)
                if wanted == names and not always:
                    return False
                if self._fill(number, json.dumps({"names": sorted(wanted)}).encode()):
                    self._next, self._names = number + 1, wanted
                    return True

    def _fill(self, number: int, entry: bytes) -> bool:
        """Fill a number's entry: with this one, or with that of a quicker writer; return whether this one."""
        claim, is_own = f"{self._prefix}{number:020d}.claim", True
        try:
            self._store.put(claim, entry, if_absent=True)
        except ConflictError:
            entry, is_own = self._store.get(claim), False
        self._begin(number + 1)
        self._store.put(self._key(number), entry)
        write_hint(self._store, self._folder.path, _HINT, number)
        return is_own

    def _begin(self, number: int) -> None:
        with suppress(ConflictError):
            self._store.put(self._key(number), _EMPTY, if_absent=True)

    def _look(self, *, begin: bool) -> tuple[int, _Names]:
        """Return the first number that is not filled, and the names in the entry before it."""
        number, names = self._next, self._names
        if number is None:
            number, names = max(read_hint(self._store, self._folder.path, _HINT), default=0), frozenset()
        try:
            found = self._entry(number)
            is_wrong = found is None and self._next is None and number > 0  # a hint is of a filled entry
        except NotFoundError:
            found, is_wrong = None, True
        if is_wrong:
            number, names = 0, frozenset()  # there is no register, or it was restored by hand since
            if begin:
                self._begin(0)
            elif not exists(self._store, self._key(0)):
                return 0, names
            found = self._entry(0)
        while found is not None:
            number, names = number + 1, found
            try:
                found = self._entry(number)
            except NotFoundError as error:  # it existed before its predecessor was filled
                if not begin:
                    raise UnavailableError(f"{self._key(number)} is not visible yet; retry") from error
                self._begin(number)  # a copy may lack it; if it exists, this put conflicts and makes it visible
                found = self._entry(number)
        self._next, self._names = number, names
        return number, names

    def _entry(self, number: int) -> _Names | None:
        key = self._key(number)
        data = self._store.get(key)
        try:
            found = parse_json(data).get("names")
            return None if found is None else frozenset(map(str, found))
        except (ValueError, TypeError, AttributeError) as error:
            raise CorruptDataError(
                f"{key} cannot be read, so the savepoints of job {self._folder.job!r} are unknown: replace its "
                "content by that of its `.claim`, or move the whole folder away while no service of the job runs",
                object_key=key,
            ) from error

    @property
    def _prefix(self) -> str:
        return f"{self._folder.path}/savepoints-made/"

    def _key(self, number: int) -> str:
        return f"{self._prefix}{number:020d}.json"
