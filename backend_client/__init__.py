"""
The state backend for PySpark: keeps a streaming operator's state in local tables and its changes in a shared log.

`ChangelogStateBackend` is the entry point, `StateTester` the one for unit tests; `join_streams` joins streams.
Importing this package does not import PySpark; the names are resolved on first use.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

import storage

if TYPE_CHECKING:
    from backend_client.progress import BatchProgress as BatchProgress
    from backend_client.spark.api.backend import ChangelogStateBackend as ChangelogStateBackend
    from backend_client.spark.api.stream_join import join_streams as join_streams
    from backend_client.testing import StateTester as StateTester

__all__ = ["BatchProgress", "ChangelogStateBackend", "StateTester", "join_streams"]

_MODULES = {
    "BatchProgress": "backend_client.progress",
    "ChangelogStateBackend": "backend_client.spark.api.backend",
    "StateTester": "backend_client.testing",
    "join_streams": "backend_client.spark.api.stream_join",
}


def _check_storage(found: str | None) -> None:
    """
    Check that the module ``storage`` is the one beside this package: a user's own module is likely to have that name.

    Raises:
        ImportError: Another one is found first.
    """
    if found is None or os.path.realpath(os.path.join(found, *[os.pardir] * 2)) != os.path.realpath(
        os.path.join(__file__, *[os.pardir] * 2)
    ):
        raise ImportError(
            f"a module named storage, {found or 'a folder'}, hides the package storage that backend_client needs: "
            "rename it, or remove its folder from Python's path"
        )


_check_storage(storage.__file__)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(_MODULES[name]), name)
    except ModuleNotFoundError as error:
        from storage.missing_packages import explained

        if (text := explained(error)) is None:
            raise
        raise ModuleNotFoundError(text, name=error.name) from error
