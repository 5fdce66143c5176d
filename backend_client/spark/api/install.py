"""
The one-line switch: routes a session's own ``transformWithState`` methods to a backend.

Spark's ``GroupedData`` is one class for all sessions, so its two methods are replaced once and check the session at
each call. In other sessions, and in this one after `uninstall`, they behave as before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Self

from pyspark.sql import GroupedData, SparkSession

from backend_client.spark.private.session import grouped_frame, is_classic, session_id_of
from storage.errors import InvalidInputError

Methods = Mapping[str, Callable[..., Any]]
"""Replacements by the name of the ``GroupedData`` method; called with the grouped rows and the arguments."""

_installed: dict[str, Methods] = {}
_originals: dict[str, Callable[..., Any]] = {}


class Installation:
    """An installed backend; undone by `uninstall` or at the end of a ``with`` block."""

    def __init__(self, session_id: str, methods: Methods) -> None:
        self._session_id = session_id
        self._methods = methods

    def uninstall(self) -> None:
        """Restore Spark's own operator in the session; running queries continue. Idempotent."""
        if _installed.get(self._session_id) is self._methods:
            _remove(self._session_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.uninstall()


def install(spark: SparkSession, methods: Methods) -> Installation:
    """
    Route the session's ``transformWithState`` methods to those of a backend.

    Raises:
        InvalidInputError: The session is one of Spark Connect, or a backend is already installed in it.
    """
    if not is_classic(spark):
        raise InvalidInputError(
            f"install takes a Spark session of this process, not {type(spark).__module__}.{type(spark).__name__}; "
            "Spark Connect is not supported: start the driver with spark-submit, or without SPARK_REMOTE and remote(…)"
        )
    session_id = session_id_of(spark)
    if session_id in _installed:
        raise InvalidInputError(
            "a backend is already installed in this session; call ChangelogStateBackend.uninstall(spark) first"
        )
    _installed[session_id] = methods
    if not _originals:
        for name in methods:
            original = getattr(GroupedData, name)
            _originals[name] = original
            setattr(GroupedData, name, _switched(name, original))
    return Installation(session_id, methods)


def uninstall(spark: SparkSession) -> None:
    """Restore Spark's own operator in a session, whichever backend is installed there; no effect without one."""
    if is_classic(spark):
        _remove(session_id_of(spark))


def _remove(session_id: str) -> None:
    _installed.pop(session_id, None)
    if not _installed:
        for name, original in _originals.items():
            setattr(GroupedData, name, original)
        _originals.clear()


def _switched(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(self: GroupedData, *args: Any, **kwargs: Any) -> Any:
        methods = _installed.get(session_id_of(grouped_frame(self).sparkSession))
        return original(self, *args, **kwargs) if methods is None else methods[name](self, *args, **kwargs)

    return call
