"""
How what does not change while a query runs gets to its tasks: once, not with every batch.

Spark pickles a function for every job that has it. Above 1 MB it makes a broadcast of that each time, whose file stays
on the driver's disk until its process ends. So a processor or a function is pickled when its query starts, as Spark's
own operators do; a large one is broadcast then, and destroyed when the query ends. Each task unpacks an object of its
own, for a processor keeps things of its task.
This is Spark's own way for functions and uses Spark's own serializer; nothing that is stored is read like this.
"""

from __future__ import annotations

import copy
import io
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType, ModuleType
from typing import Any

from pyspark import Broadcast, SparkContext
from pyspark.cloudpickle import CloudPickler
from pyspark.serializers import CloudPickleSerializer

from storage.errors import InvalidInputError

_INLINE_BYTES_MAX = 1 << 18
"""What is larger is broadcast; far below the 1 MB from which on Spark would do so itself."""

_VIEWS = (
    *(
        type(view())
        for kind in (dict[str, Any](), OrderedDict[str, Any]())
        for view in (kind.keys, kind.values, kind.items)
    ),
    *(MappingProxyType, memoryview, classmethod, staticmethod, io.TextIOWrapper),
)
"""What Spark's serializer sends, and Python makes no copy of."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """
    One object, pickled.

    Args:
        content: Its bytes.
        broadcasts: The user's own ones that are part of it. Spark has to see them, to bring them to the tasks.
    """

    content: bytes | Broadcast[bytes]
    broadcasts: tuple[Broadcast[Any], ...] = ()

    def unpack(self) -> Any:
        """Return the object, a new one with each call; in a task."""
        content = self.content if isinstance(self.content, bytes) else self.content.value
        return CloudPickleSerializer().loads(content)  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class ShippedFunction:
    """A user's function as Spark ships it: itself in a parcel."""

    parcel: Parcel

    def __call__(self, *args: Any) -> Any:
        """Call the function, in a task."""
        return self.parcel.unpack()(*args)


class Shipments:
    """What one query ships. Not thread-safe."""

    def __init__(self, context: SparkContext) -> None:
        self._context = context
        self._parcels: dict[int, tuple[Any, Parcel]] = {}

    def parcel(self, what: Any) -> Parcel:
        """
        Return an object's parcel, packed when it is asked for first; what becomes of the object later does not count.

        Raises:
            InvalidInputError: It cannot be pickled.
        """
        known = self._parcels.get(id(what))
        if known is None:
            known = self._parcels[id(what)] = what, self._packed(what)
        return known[1]

    def function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return what Spark is to be given instead of a function. Raises as `parcel` does."""
        return ShippedFunction(self.parcel(function)).__call__

    def close(self) -> None:
        """Remove what was broadcast, on the executors and on the driver's disk; counts once."""
        parcels = [parcel for _, parcel in self._parcels.values()]
        self._parcels.clear()
        for parcel in parcels:
            if not isinstance(parcel.content, bytes):
                parcel.content.destroy()

    def _packed(self, what: Any) -> Parcel:
        data, shared = _pickled(what)
        broadcasts = tuple(item for item in shared if isinstance(item, Broadcast))
        return Parcel(data if len(data) <= _INLINE_BYTES_MAX else self._context.broadcast(data), broadcasts)


def copy_of(what: Any) -> Any:
    """
    Return a copy such as a task gets: what is done to it is not done to the object.

    Views and files are the object's own: they can be sent to tasks, but not copied.

    Raises:
        InvalidInputError: It cannot be pickled, so no task could get it.
    """
    _, shared = _pickled(what)
    try:
        return copy.deepcopy(what, {id(item): item for item in shared})
    except Exception as error:
        raise _unfit(what, error) from error


class _Pickler(CloudPickler):
    """Pickles as Spark does, and finds what a copy shares with the object: modules and broadcasts, views and files."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)  # type: ignore[no-untyped-call]
        self.shared: list[Any] = []

    def reducer_override(self, obj: Any) -> Any:
        """Note the object down, and pickle it as ever."""
        if isinstance(obj, (Broadcast, ModuleType, *_VIEWS)):
            self.shared.append(obj)
        return super().reducer_override(obj)  # type: ignore[no-untyped-call]


def _pickled(what: Any) -> tuple[bytes, list[Any]]:
    file = io.BytesIO()
    pickler = _Pickler(file)
    try:
        pickler.dump(what)  # type: ignore[no-untyped-call]
    except Exception as error:
        raise _unfit(what, error) from error
    return file.getvalue(), pickler.shared


def _unfit(what: Any, error: Exception) -> InvalidInputError:
    name = getattr(what, "__name__", type(what).__name__)
    return InvalidInputError(
        f"{name} cannot be sent to tasks: {error}. What only lives within a process (locks, connections, pools) is "
        "made in the tasks: by a processor in init, by a function in itself"
    )
