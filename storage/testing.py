"""
Test doubles for programs that use a store; shipped, so that users can test with them, too.

`FaultyStore` fails by script, `RecordingStore` records its calls; both wrap any store.
`FakeClock` and `FakeIds` make time and ids predictable.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal, TypeAlias, TypeVar

from storage.errors import InvalidInputError, UnavailableError
from storage.model import ObjectInfo
from storage.object_store import PROBE_FOLDER, ObjectData, ObjectStore, buffers_of

Operation: TypeAlias = Literal["put", "get", "get_range", "head", "list", "delete", "check_writable"]

_Result = TypeVar("_Result")


class FaultKind(enum.Enum):
    """The kind of fault."""

    FAIL_BEFORE = "fail_before"
    """The operation has no effect and raises."""

    FAIL_AFTER = "fail_after"
    """The operation takes effect, then raises: a lost response."""

    DELAY = "delay"
    """The operation waits for `delay_ms` or `FaultyStore.release`, and is then executed."""

    PARTIAL_WRITE = "partial_write"
    """A `put` stores only the first `kept_bytes` bytes and raises: a store that is not atomic."""


def _unavailable() -> Exception:
    return UnavailableError("injected fault")


@dataclass(slots=True)
class Fault:
    """
    One line of the script of a `FaultyStore`.

    Args:
        operation: The affected operation.
        kind: The kind of fault.
        key_pattern: Shell pattern of keys; a `delete` matches if one of its keys does, a `list` by its prefix.
        times: How often, or None for always.
        skip: How many matching calls succeed before.
        error: Returns the error to raise.
        delay_ms: For `DELAY`; None waits for `FaultyStore.release` alone.
        kept_bytes: For `PARTIAL_WRITE`.
    """

    operation: Operation
    kind: FaultKind
    key_pattern: str = "*"
    times: int | None = 1
    skip: int = 0
    error: Callable[[], Exception] = field(default=_unavailable)
    delay_ms: int | None = None
    kept_bytes: int = 0

    def __post_init__(self) -> None:
        if self.kind is FaultKind.PARTIAL_WRITE and self.operation != "put":
            raise InvalidInputError("only a put can be partial")


class FaultyStore:
    """
    A store that fails by script. If several faults match a call, the first remaining one applies.

    Args:
        inner: The wrapped store.
        faults: The script; `inject` adds to it.
    """

    def __init__(self, inner: ObjectStore, *faults: Fault) -> None:
        self._inner = inner
        self._faults = list(faults)
        self._lock = threading.Lock()
        self._released = threading.Event()

    @property
    def url(self) -> str:
        """The URL of the inner store."""
        return self._inner.url

    def inject(self, *faults: Fault) -> None:
        """Append faults to the script; delayed calls wait again, even after a `release`."""
        self._released.clear()
        with self._lock:
            self._faults.extend(faults)

    def heal(self) -> None:
        """Drop all remaining faults and release waiting calls."""
        with self._lock:
            self._faults.clear()
        self.release()

    def release(self) -> None:
        """End the waits of all delayed calls, until the next `inject`."""
        self._released.set()

    def put(self, key: str, data: ObjectData, *, if_absent: bool = False) -> None:
        """Pass the call on, unless a fault applies."""

        def partial(kept_bytes: int) -> None:
            self._inner.put(key, b"".join(buffers_of(data))[:kept_bytes], if_absent=if_absent)

        self._run("put", [key], lambda: self._inner.put(key, data, if_absent=if_absent), partial)

    def get(self, key: str) -> bytes:
        """Pass the call on, unless a fault applies."""
        return self._run("get", [key], lambda: self._inner.get(key))

    def get_range(self, key: str, offset: int, size: int) -> bytes:
        """Pass the call on, unless a fault applies."""
        return self._run("get_range", [key], lambda: self._inner.get_range(key, offset, size))

    def head(self, key: str) -> ObjectInfo:
        """Pass the call on, unless a fault applies."""
        return self._run("head", [key], lambda: self._inner.head(key))

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        """Pass the call on, unless a fault applies."""
        return self._run("list", [prefix], lambda: self._inner.list(prefix, start_after=start_after))

    def delete(self, keys: Iterable[str]) -> None:
        """Pass the call on, unless a fault applies."""
        wanted = tuple(keys)
        self._run("delete", wanted, lambda: self._inner.delete(wanted))

    def check_writable(self, folder: str = PROBE_FOLDER) -> None:
        """Pass the call on, unless a fault applies."""
        self._run("check_writable", [""], lambda: self._inner.check_writable(folder))

    def close(self) -> None:
        """Release all delayed calls, and close the inner store."""
        self.release()
        self._inner.close()

    def _run(
        self,
        operation: Operation,
        keys: Sequence[str],
        act: Callable[[], _Result],
        act_partially: Callable[[int], None] | None = None,
    ) -> _Result:
        fault = self._next_fault(operation, keys)
        if fault is None:
            return act()
        if fault.kind is FaultKind.DELAY:
            self._released.wait(None if fault.delay_ms is None else fault.delay_ms / 1000)
            return act()
        if fault.kind is FaultKind.FAIL_AFTER:
            act()
        if fault.kind is FaultKind.PARTIAL_WRITE and act_partially is not None:
            act_partially(fault.kept_bytes)
        raise fault.error()

    def _next_fault(self, operation: Operation, keys: Sequence[str]) -> Fault | None:
        with self._lock:
            for fault in self._faults:
                if fault.operation != operation or not any(fnmatchcase(key, fault.key_pattern) for key in keys):
                    continue
                if fault.skip > 0:
                    fault.skip -= 1
                    continue
                if fault.times is None:
                    return fault
                if fault.times > 0:
                    fault.times -= 1
                    return fault
        return None


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """
    A call that a `RecordingStore` passed on.

    Args:
        operation: Its name.
        key: Its key or prefix; a `delete` of n keys is recorded as n calls.
        size_bytes: Bytes passed to `put` or requested by `get_range`; else 0.
    """

    operation: Operation
    key: str
    size_bytes: int = 0


class RecordingStore:
    """
    A store that records its calls in order, whether they succeed or not.

    Args:
        inner: The wrapped store.
    """

    def __init__(self, inner: ObjectStore) -> None:
        self._inner = inner
        self._lock = threading.Lock()
        self._calls: list[RecordedCall] = []

    @property
    def url(self) -> str:
        """The URL of the inner store."""
        return self._inner.url

    @property
    def calls(self) -> Sequence[RecordedCall]:
        """All calls so far."""
        with self._lock:
            return tuple(self._calls)

    def count(self, operation: Operation, key_pattern: str = "*") -> int:
        """Return how many calls of an operation had a key of this shell pattern."""
        return len(self.keys(operation, key_pattern))

    def keys(self, operation: Operation, key_pattern: str = "*") -> Sequence[str]:
        """Return the keys of an operation's calls that match the shell pattern."""
        return [call.key for call in self.calls if call.operation == operation and fnmatchcase(call.key, key_pattern)]

    def clear(self) -> None:
        """Forget all calls."""
        with self._lock:
            self._calls.clear()

    def put(self, key: str, data: ObjectData, *, if_absent: bool = False) -> None:
        """Record the call and pass it on."""
        self._record("put", key, sum(len(buffer) for buffer in buffers_of(data)))
        self._inner.put(key, data, if_absent=if_absent)

    def get(self, key: str) -> bytes:
        """Record the call and pass it on."""
        self._record("get", key)
        return self._inner.get(key)

    def get_range(self, key: str, offset: int, size: int) -> bytes:
        """Record the call and pass it on."""
        self._record("get_range", key, size)
        return self._inner.get_range(key, offset, size)

    def head(self, key: str) -> ObjectInfo:
        """Record the call and pass it on."""
        self._record("head", key)
        return self._inner.head(key)

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        """Record the call and pass it on."""
        self._record("list", prefix)
        return self._inner.list(prefix, start_after=start_after)

    def delete(self, keys: Iterable[str]) -> None:
        """Record the call and pass it on."""
        wanted = tuple(keys)
        for key in wanted:
            self._record("delete", key)
        self._inner.delete(wanted)

    def check_writable(self, folder: str = PROBE_FOLDER) -> None:
        """Record the call and pass it on."""
        self._record("check_writable", "")
        self._inner.check_writable(folder)

    def close(self) -> None:
        """Close the inner store."""
        self._inner.close()

    def _record(self, operation: Operation, key: str, size_bytes: int = 0) -> None:
        with self._lock:
            self._calls.append(RecordedCall(operation, key, size_bytes))


class FakeClock:
    """
    A clock that moves only when told to.

    Args:
        now_ms: The wall time at the start; the monotonic time starts at 0.
    """

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self._start_ms = now_ms
        self._elapsed_ms = 0
        self._lock = threading.Lock()

    def now_ms(self) -> int:
        """Return the start time plus the elapsed time."""
        return self._start_ms + self._elapsed_ms

    def monotonic_ms(self) -> int:
        """Return the elapsed time."""
        return self._elapsed_ms

    def advance(self, delta_ms: int) -> None:
        """Advance the clock by `delta_ms` >= 0."""
        if delta_ms < 0:
            raise InvalidInputError(f"delta_ms must not be negative, it is {delta_ms}")
        with self._lock:
            self._elapsed_ms += delta_ms


class FakeIds:
    """
    Ids 1, 2, 3, … as 32 hexadecimal digits.

    Args:
        host: 0..65535, the first four digits; ids of different hosts never collide.
    """

    def __init__(self, host: int = 0) -> None:
        self._host = host
        self._last = 0
        self._lock = threading.Lock()

    def unique_id(self) -> str:
        """Return the next id."""
        with self._lock:
            self._last += 1
            return f"{self._host:04x}{self._last:028x}"
