"""
Spark's daemon of Python workers, which imports what a task needs before it starts any worker.

Spark forks a worker for each task that runs at a time, and another one for each that was lost: with a new executor, or
with a task that failed or could not read its rows. Each would import the same modules, for about a second. Forked from
a process that has them, a worker starts in milliseconds, and shares their memory with the others.

Spark starts it with the setting ``spark.python.daemon.module``; the workers' Python must have this package installed.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import zipimport
from collections.abc import Iterable

from pyspark.daemon import manager

_MODULES = (
    "pyspark.worker",
    "pyspark.sql.pandas.serializers",
    "backend_client.spark.task.task",
    "backend_client.spark.task.pandas_calls",
)


def preload(modules: Iterable[str] = _MODULES) -> None:
    """
    Import modules; one that cannot be imported is left to the workers, which say why.

    Nothing may be written to the standard output, on which Spark waits for the daemon's port.
    """
    output, sys.stdout = sys.stdout, sys.stderr
    try:
        for name in modules:
            try:
                importlib.import_module(name)
            except Exception as error:  # noqa: BLE001 - other queries of the application may not need it
                sys.stderr.write(f"dstl: {name} is not imported before workers start: {error!r}\n")
    finally:
        sys.stdout = output
    _forget_zip_finders()
    os.register_at_fork(after_in_child=_seed)
    gc.collect()
    gc.freeze()  # a collection in a worker would copy all that it shares with the others


def _forget_zip_finders() -> None:
    """
    Forget the finders of modules in zip files; the next import makes those that it needs.

    A worker's first task invalidates all finders. In Spark's own zip, the finder of each package then reads the whole
    index, which would take a worker longer than everything else until it runs its task.
    """
    for path, finder in list(sys.path_importer_cache.items()):
        if isinstance(finder, zipimport.zipimporter):
            del sys.path_importer_cache[path]


def _seed() -> None:
    """Have each worker draw random numbers of its own, as if it had imported numpy itself."""
    generators = sys.modules.get("numpy.random")
    if generators is not None:
        generators.seed()


if __name__ == "__main__":
    preload()
    manager()
