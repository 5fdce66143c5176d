"""A process that is paused or killed at any of its store calls, while other processes act."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase

from storage.errors import NotFoundError
from storage.model import ObjectInfo
from storage.object_store import PROBE_FOLDER, ObjectData, ObjectStore

Step = Callable[[], object]


class Killed(BaseException):
    """Ends a process at its current call; no code catches it."""


def kill() -> None:
    """End the process that reaches this step."""
    raise Killed


class PausingStore:
    """
    Forwards the calls of one process to a store that others use as well; at chosen calls the process is paused.

    Args:
        inner: The shared store.
    """

    def __init__(self, inner: ObjectStore) -> None:
        self._inner = inner
        self._steps: list[tuple[str, str, Step]] = []
        self._numbered: dict[int, Step] = {}
        self.calls = 0

    @property
    def url(self) -> str:
        """The URL of the inner store."""
        return self._inner.url

    def pause_at(self, operation: str, key_pattern: str, step: Step) -> None:
        """Run `step` once, before the next call of an operation with such a key."""
        self._steps.append((operation, key_pattern, step))

    def pause_before(self, call: int, step: Step) -> None:
        """Run `step` before the call of this number, counted from 0."""
        self._numbered[call] = step

    def put(self, key: str, data: ObjectData, *, if_absent: bool = False) -> None:
        """Forward the call when it is its turn."""
        self._reach("put", key)
        self._inner.put(key, data, if_absent=if_absent)

    def get(self, key: str) -> bytes:
        """Forward the call when it is its turn."""
        self._reach("get", key)
        return self._inner.get(key)

    def get_range(self, key: str, offset: int, size: int) -> bytes:
        """Forward the call when it is its turn."""
        self._reach("get_range", key)
        return self._inner.get_range(key, offset, size)

    def head(self, key: str) -> ObjectInfo:
        """Forward the call when it is its turn."""
        self._reach("head", key)
        return self._inner.head(key)

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        """Return the existing objects when it is its turn, in one page."""
        self._reach("list", prefix)
        return iter(list(self._inner.list(prefix, start_after=start_after)))

    def delete(self, keys: Iterable[str]) -> None:
        """Delete key by key, each when it is its turn."""
        for key in tuple(keys):
            self._reach("delete", key)
            self._inner.delete([key])

    def check_writable(self, folder: str = PROBE_FOLDER) -> None:
        """Forward the call when it is its turn."""
        self._reach("check_writable", "")
        self._inner.check_writable(folder)

    def close(self) -> None:
        """Do nothing: others use the store."""

    def _reach(self, operation: str, key: str) -> None:
        number, self.calls = self.calls, self.calls + 1
        step = self._numbered.pop(number, None)
        for item in self._steps:
            if item[0] == operation and fnmatchcase(key, item[1]):
                self._steps.remove(item)
                step = item[2]
                break
        if step is not None:
            step()


class StaleStore(PausingStore):
    """
    A host's view of a mounted file system that caches listings: objects are current, listings are stale.

    Args:
        inner: The shared store.
        prefix: Prefix of the stale listings.
    """

    def __init__(self, inner: ObjectStore, prefix: str = "") -> None:
        super().__init__(inner)
        self._prefix = prefix
        self._listed = list(inner.list(prefix))

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        """Return the listing of this host's first read."""
        if not prefix.startswith(self._prefix):
            return super().list(prefix, start_after=start_after)
        self._reach("list", prefix)
        return iter([info for info in self._listed if info.key.startswith(prefix) and info.key > start_after])


class CachedStore(StaleStore):
    """
    The view of a host that also caches absent names: a name that was absent at its first read stays absent.

    Existing objects are current, and so is what this host finds when it puts something.
    """

    def __init__(self, inner: ObjectStore) -> None:
        super().__init__(inner)
        self._found = {info.key for info in self._listed}

    def put(self, key: str, data: ObjectData, *, if_absent: bool = False) -> None:
        """Forward the call; from then on the name is up to date."""
        self._found.add(key)
        super().put(key, data, if_absent=if_absent)

    def get(self, key: str) -> bytes:
        """Return an object, unless its absence is cached."""
        self._look_up(key)
        return super().get(key)

    def get_range(self, key: str, offset: int, size: int) -> bytes:
        """Return a part of an object, unless its absence is cached."""
        self._look_up(key)
        return super().get_range(key, offset, size)

    def head(self, key: str) -> ObjectInfo:
        """Describe an object, unless its absence is cached."""
        self._look_up(key)
        return super().head(key)

    def _look_up(self, key: str) -> None:
        if key not in self._found:
            raise NotFoundError(f"object {key} does not exist", key=key)
