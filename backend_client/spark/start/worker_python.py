"""
Which Python the workers run, found out when a query starts rather than by a traceback from its first task.

Spark takes ``PYSPARK_PYTHON`` and without it the ``python3`` that it finds on the path, which is seldom that of an
activated environment. Where driver and workers are one host, the driver's own interpreter is the right one.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from pyspark import SparkContext
from pyspark.sql import SparkSession

from storage.errors import InvalidInputError

logger = logging.getLogger("backend_client")

_MODULES = ("backend_client", "msgpack", "numpy", "pandas", "pyarrow", "rocksdict", "xxhash")
"""What a task imports."""

_SIGNS = ("ModuleNotFoundError", "ImportError", "PYTHON_VERSION_MISMATCH", "Cannot run program")
_WORKERS_ASKED_MAX = 16
_checked: set[tuple[str, str]] = set()


def check_worker_python(spark: SparkSession) -> None:
    """
    Find out whether the workers' Python can run a task: in local mode it is made the driver's, unless a user chose one.

    A small job asks the workers, once for a session and an interpreter, and only where theirs is not the driver's.

    Raises:
        InvalidInputError: It lacks modules, is of another version than the driver's, or is not there.
    """
    context = spark.sparkContext
    is_local = str(context.master).startswith("local") and not str(context.master).startswith("local-cluster")
    if is_local and not os.environ.get("PYSPARK_PYTHON"):
        context.pythonExec = sys.executable
    if (is_local and context.pythonExec == sys.executable) or (context.applicationId, context.pythonExec) in _checked:
        return
    _ask_workers(context)
    _checked.add((context.applicationId, context.pythonExec))


def _ask_workers(context: SparkContext) -> None:
    count = max(1, min(context.defaultParallelism, _WORKERS_ASKED_MAX))
    try:
        answers = context.parallelize(range(count), count).mapPartitions(_question()).collect()
    except Exception as error:
        sign = next((line.strip() for line in str(error).splitlines() if any(sign in line for sign in _SIGNS)), None)
        if sign is None:
            logger.warning("the workers' Python could not be asked for its modules: %s", error)
            return
        raise InvalidInputError(
            f"the workers' Python ({context.pythonExec}) cannot run tasks: {sign}. {_remedy()}"
        ) from error
    for executable, missing in answers:
        if missing:
            raise InvalidInputError(
                f"the workers' Python {executable} has no module named {', '.join(missing)}, the driver's "
                f"({sys.executable}) has. {_remedy()}"
            )


def _question() -> Callable[[Iterable[int]], Iterable[tuple[str, list[str]]]]:
    """Return a function that can be sent to a Python without this package: what is nested goes by its code."""
    modules = _MODULES

    def ask(_: Any) -> Iterator[tuple[str, list[str]]]:
        import importlib.util
        import sys

        yield sys.executable, [name for name in modules if importlib.util.find_spec(name) is None]

    return ask


def _remedy() -> str:
    chosen = os.environ.get("PYSPARK_PYTHON")
    return (
        f"Before the session starts, set PYSPARK_PYTHON (it is {chosen or 'not set'}) to an interpreter that is on "
        "every host and has the same packages as the driver's, or install them there: pip install 'dstl[spark,service]'"
    )
