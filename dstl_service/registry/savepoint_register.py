"""
The register of a job's savepoints: the truth of their names, for every deletion, even where listings are stale.

    savepoints-made/<20 digits>.claim   decides the content of this number's entry; put if absent
    savepoints-made/<20 digits>.json    the entry: all that is registered after this change; empty until it is filled

An entry names objects in ``savepoints/``, and says which of them is the savepoint of its name. So a name is given, and
taken back, in one decision, and means one object, which is written once and deleted once.

A mounted file system may serve listings, and answers that a name does not exist, from its cache. It never caches the
content of an existing object, even of a replaced one, nor the result of a put that creates. So a reader reads only
objects that exist: each number's object exists, empty, before the number before it is filled. It is overwritten once,
with the content of its claim, which every finder of the claim may do. A filled entry never changes again, however late
the same content is put again. See ``docs/decisions/0023-savepoints-on-cached-listings.md``. Blocking I/O.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace

from dstl_service.formats.checksummed_json import stamp, unstamp
from dstl_service.registry.hints import read_hint, write_hint
from dstl_service.registry.lives import LifeFolder
from storage.errors import ConflictError, CorruptDataError, NotFoundError, UnavailableError
from storage.object_store import ObjectStore

PIN = "@"
"""Follows the savepoint's name in that of its object; no name of a user's has it."""
_HINT = "savepoints"
_EMPTY = b"{}"
_BARRED = "!"
"""Follows some pins in entries of earlier versions; no name ends with it."""
_UNREADABLE = (ValueError, TypeError, AttributeError)
"""Errors of decoding a damaged entry."""
_Names = frozenset[str]


@dataclass(frozen=True, slots=True)
class Registered:
    """
    The content of the register at one moment.

    Args:
        objects: Names of the objects that are registered, whether they are savepoints or pins.
        published: Those that are the savepoint of their name; one of each name.
        gone: Names that are never registered: their objects were deleted before they were.
    """

    objects: _Names = frozenset()
    published: _Names = frozenset()
    gone: _Names = frozenset()

    def object_of(self, name: str) -> str | None:
        """Return the object that is the savepoint of a name, or None."""
        return max((one for one in self.published if name_of(one) == name), default=None)

    def title(self, one: str) -> str:
        """Return what people call an object: a savepoint's name, or that of the pin itself."""
        return name_of(one) if one in self.published else one

    def without(self, objects: Iterable[str]) -> Registered:
        """Return the state after these were removed; those that are not registered never will be."""
        off = frozenset(objects)
        return Registered(self.objects - off, self.published - off, self.gone | (off - self.objects))

    def encode(self) -> bytes:
        """Return an entry's content; ``names`` is what earlier versions read."""
        pinned = {one for one in self.published if PIN in one}
        lists = {"names": self.objects, "published": pinned, "gone": self.gone}
        return stamp({key: sorted(names) for key, names in lists.items() if names or key == "names"})

    @classmethod
    def decode(cls, data: bytes) -> Registered | None:
        """Read an entry, also of an earlier version; None if it is not filled. Raises what a damaged one causes."""
        found = unstamp(data)
        if (names := found.get("names")) is None:
            return None
        objects = frozenset(str(name).removesuffix(_BARRED) for name in names)
        pinned = objects & frozenset(found.get("published", ()))
        return cls(objects, pinned | {one for one in objects if PIN not in one}, frozenset(found.get("gone", ())))


class SavepointRegister:
    """Knows the savepoints of one life, as far as they were made with a register; thread-safe."""

    def __init__(self, store: ObjectStore, folder: LifeFolder) -> None:
        self._store = store
        self._folder = folder
        self._lock = threading.Lock()
        self._next: int | None = None
        self._now = Registered()

    def read(self, *, begin: bool = True) -> Registered:
        """
        Return what is registered now; one request after the process's first call.

        Args:
            begin: Create the register of a job that has none. Required before a deletion and before a savepoint is
                made, since the answer that there is none may be stale. If false, nothing is written.

        Raises:
            CorruptDataError: An entry cannot be read: delete nothing.
        """
        with self._lock:
            return self._look(begin=begin)[1]

    def add(self, one: str) -> None:
        """
        Put an object on the register; every read that starts after this call sees it.

        Raises:
            UnavailableError: Another process deleted it before.
        """
        now = self._change(lambda now: now if one in now.gone else replace(now, objects=now.objects | {one}))
        if one not in now.objects:
            raise self._deleted(one)

    def publish(self, one: str, check: Callable[[str], object]) -> bool:
        """
        Make an object the savepoint of its name, in one entry; if there is one, take it off instead.

        Args:
            one: It is on the register.
            check: Raises unless the object that has the name will do.

        Returns:
            Whether it is the savepoint.

        Raises:
            UnavailableError: Another process took it off, so it may have kept nothing since.
        """

        def step(now: Registered) -> Registered:
            if one not in now.objects:
                raise self._deleted(one)
            if (there := now.object_of(name_of(one))) is None:
                return replace(now, published=now.published | {one})
            check(there)
            return now.without({one})

        return one in self._change(step).published

    def remove(self, name: str) -> _Names:
        """
        Remove the object that a name means: a savepoint, or a pin that is not one by then.

        If there is nothing, objects of that name that are listed only are meant: of a call that died while it deleted
        the savepoint, or before it had registered one.

        Returns:
            The names of the objects, whose turn to be deleted it is; empty if nothing has the name.
        """
        listed = frozenset(savepoint_objects(self._store, self._folder, name))
        off: _Names = frozenset()

        def step(now: Registered) -> Registered:
            nonlocal off
            off = frozenset(one for one in now.objects | listed if now.title(one) == name)
            off = off or frozenset(one for one in listed - now.objects if name_of(one) == name)
            return now.without(off)

        self._change(step)
        return off

    def take_off(self, one: str) -> None:
        """Take off an object, whether it is a savepoint or a pin by then; it never comes there again."""
        self._change(lambda now: now.without({one}))

    def _change(self, step: Callable[[Registered], Registered]) -> Registered:
        """Make an entry of what a step changes, if anything; return what it led to."""
        with self._lock:
            while True:
                number, now = self._look(begin=True)
                wanted = step(now)
                if wanted == now:
                    return now
                if self._fill(number, wanted):
                    self._next, self._now = number + 1, wanted
                    return wanted

    def _fill(self, number: int, filled: Registered) -> bool:
        """Fill a number's entry: with this one, or with that of a quicker writer; return whether this one."""
        claim, entry, is_own = self._claim(number), filled.encode(), True
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

    def _look(self, *, begin: bool) -> tuple[int, Registered]:
        """Return the first number that is not filled, and the entry before it."""
        number, now = self._next, self._now
        if number is None:
            number, now = max(read_hint(self._store, self._folder.path, _HINT), default=0), Registered()
        try:
            found = self._entry(number)
            is_wrong = found is None and self._next is None and number > 0  # a hint is of a filled entry
        except NotFoundError:
            found, is_wrong = None, number > 0
        if is_wrong:
            number, now = 0, Registered()  # there is no register, or it was restored by hand since
            with suppress(NotFoundError):
                found = self._entry(0)
        if number == 0 and found is None:
            now = self._listed()
            if not begin:
                return 0, now
            self._fill(0, now)
            found = self._entry(0)
        while found is not None:
            number, now = number + 1, found
            try:
                found = self._entry(number)
            except NotFoundError as error:  # it existed before its predecessor was filled
                if not begin:
                    raise UnavailableError(f"{self._key(number)} is not visible yet; retry") from error
                self._begin(number)  # a copy may lack it; if it exists, this put conflicts and makes it visible
                found = self._entry(number)
        self._next, self._now = number, now
        return number, now

    def _listed(self) -> Registered:
        """
        Return the first entry of a register: what is listed where the register is lost, or was not copied.

        A call that makes a savepoint fills the first entry before, so pins of running calls are not among them, but
        pins of calls that died may be; of two objects of one name the newer one is the savepoint. Objects of earlier
        versions need no entry.
        """
        pinned = [one for one in sorted(savepoint_objects(self._store, self._folder)) if _is_of_this_version(one)]
        objects = frozenset({name_of(one): one for one in pinned}.values())
        return Registered(objects, objects)

    def _entry(self, number: int) -> Registered | None:
        """Read a number's entry; one that is damaged, or was written in part, by the claim that decided its content."""
        key = self._key(number)
        data = self._store.get(key)
        with suppress(*_UNREADABLE):
            return Registered.decode(data)
        try:
            return Registered.decode(self._store.get(self._claim(number)))
        except (NotFoundError, *_UNREADABLE) as error:
            raise CorruptDataError(
                f"neither {key} nor its `.claim` can be read, so the savepoints of job {self._folder.job!r} are "
                "unknown: put one of both back, or move the whole folder away while no service of the job runs",
                object_key=key,
            ) from error

    def _deleted(self, one: str) -> UnavailableError:
        return UnavailableError(
            f"{one} of job {self._folder.job!r} was deleted while the savepoint was made; retry", job=self._folder.job
        )

    @property
    def _prefix(self) -> str:
        return f"{self._folder.path}/savepoints-made/"

    def _claim(self, number: int) -> str:
        return f"{self._prefix}{number:020d}.claim"

    def _key(self, number: int) -> str:
        return f"{self._prefix}{number:020d}.json"


def name_of(one: str) -> str:
    """Return the savepoint's name, of which an object is or was to be."""
    return one.partition(PIN)[0]


def savepoint_objects(store: ObjectStore, folder: LifeFolder, name: str = "") -> list[str]:
    """Return the names of the objects in ``savepoints/`` that are listed, and begin with `name`."""
    prefix = f"{folder.path}/savepoints/"
    return [info.key.removeprefix(prefix).removesuffix(".json") for info in store.list(f"{prefix}{name}")]


def _is_of_this_version(one: str) -> bool:
    """Return whether an object may be a savepoint: earlier versions named only pins so, with a number at the end."""
    return PIN in one and "-" not in one.partition(PIN)[2]
