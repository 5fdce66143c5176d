"""
Ships what stays constant during a query to its tasks: once, not with every batch.

Spark pickles a function for every job that uses it. Above 1 MB it broadcasts the result each time, and the broadcast's
file stays on the driver's disk until the process ends. So a processor or function is pickled when its query starts, as
in Spark's own operators; a large one is then broadcast once, and destroyed when the query ends. Each task unpacks its
own object, because a processor holds per-task resources.
Functions travel as in Spark, with Spark's own serializer; no stored data is read this way.
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

from backend_client.spark.private.session import is_stopped
from storage.errors import InvalidInputError

_INLINE_BYTES_MAX = 1 << 18
"""Larger pickles are broadcast; far below the 1 MB at which Spark would broadcast by itself."""

_VIEWS = (
    *(
        type(view())
        for kind in (dict[str, Any](), OrderedDict[str, Any]())
        for view in (kind.keys, kind.values, kind.items)
    ),
    *(MappingProxyType, memoryview, classmethod, staticmethod, io.TextIOWrapper),
)
"""Types that Spark's serializer can send but Python cannot copy."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """
    One object, pickled.

    Args:
        content: Its bytes.
        broadcasts: The user's own broadcasts inside it. Spark must see them to send them to the tasks.
    """

    content: bytes | Broadcast[bytes]
    broadcasts: tuple[Broadcast[Any], ...] = ()

    def unpack(self) -> Any:
        """Return the object, a new one with each call. To be called in a task."""
        content = self.content if isinstance(self.content, bytes) else self.content.value
        return CloudPickleSerializer().loads(content)  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class ShippedFunction:
    """A user's function in a parcel; Spark ships this in its place."""

    parcel: Parcel

    def __call__(self, *args: Any) -> Any:
        """Call the function, in a task."""
        return self.parcel.unpack()(*args)


class Shipments:
    """The parcels of one query. Not thread-safe."""

    def __init__(self, context: SparkContext) -> None:
        self._context = context
        self._parcels: dict[int, tuple[Any, Parcel]] = {}

    def parcel(self, what: Any) -> Parcel:
        """
        Return an object's parcel, pickled at the first call; later changes to the object have no effect.

        Raises:
            InvalidInputError: The object cannot be pickled.
        """
        known = self._parcels.get(id(what))
        if known is None:
            known = self._parcels[id(what)] = what, self._packed(what)
        return known[1]

    def function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the stand-in that Spark gets instead of a function. Raises as `parcel` does."""
        return ShippedFunction(self.parcel(function)).__call__

    @property
    def is_spark_stopped(self) -> bool:
        """Whether Spark has been stopped: nothing is sent any more."""
        return is_stopped(self._context)

    def close(self) -> None:
        """Destroy the broadcasts, on the executors and on the driver's disk. Idempotent."""
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
    Return a copy like the one that a task gets; changes to it do not affect the object.

    Views and files are shared with the object: they can be sent to tasks, but not copied.

    Raises:
        InvalidInputError: The object cannot be pickled, so no task could get it.
    """
    _, shared = _pickled(what)
    try:
        return copy.deepcopy(what, {id(item): item for item in shared})
    except Exception as error:
        raise _unfit(what, error) from error


class _Pickler(CloudPickler):
    """Pickles as Spark does and collects what a copy shares with the object: modules, broadcasts, views and files."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)  # type: ignore[no-untyped-call]
        self.shared: list[Any] = []

    def reducer_override(self, obj: Any) -> Any:
        """Record a shared object; pickle it as usual."""
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
        f"{name} cannot be sent to tasks: {error}. Create what lives in one process (locks, connections, pools) in the "
        "tasks: in a processor's init, or inside the function"
    )
