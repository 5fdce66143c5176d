"""
Checks the workers' Python when a query starts, instead of by a traceback from its first task.

Spark uses ``PYSPARK_PYTHON``, or else the ``python3`` on the path, which is seldom that of an activated environment.
If driver and workers share one host, the driver's own interpreter is the right one.
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
"""The modules that a task imports."""

_SIGNS = (
    "ModuleNotFoundError",
    "ImportError",
    "PYTHON_VERSION_MISMATCH",
    "Cannot run program",
    "reading the port number",  # from a daemon of workers that has ended, as without its module
)
_WORKERS_ASKED_MAX = 16
_checked: set[tuple[str, str]] = set()


def check_worker_python(spark: SparkSession) -> None:
    """
    Check that the workers' Python can run a task; in local mode, set it to the driver's unless the user chose one.

    A small job asks the workers, once per session and interpreter, and only if theirs is not the driver's.

    Raises:
        InvalidInputError: The workers' Python lacks modules, differs from the driver's in version, or does not exist.
    """
    context, is_local = spark.sparkContext, take_drivers_python(spark)
    if (is_local and context.pythonExec == sys.executable) or (context.applicationId, context.pythonExec) in _checked:
        return
    _ask_workers(context)
    _checked.add((context.applicationId, context.pythonExec))


def take_drivers_python(spark: SparkSession) -> bool:
    """
    In local mode, set the workers' Python to the driver's unless the user chose one; return whether it is local mode.

    Functions sent to Spark have the interpreter of that moment, a Python data source that of its registration.
    """
    context = spark.sparkContext
    is_local = str(context.master).startswith("local") and not str(context.master).startswith("local-cluster")
    if is_local and not os.environ.get("PYSPARK_PYTHON"):
        context.pythonExec = sys.executable
    return is_local


def _ask_workers(context: SparkContext) -> None:
    count = max(1, min(context.defaultParallelism, _WORKERS_ASKED_MAX))
    try:
        answers = context.parallelize(range(count), count).mapPartitions(_question()).collect()
    except Exception as error:
        sign = next((line.strip() for line in str(error).splitlines() if any(sign in line for sign in _SIGNS)), None)
        if sign is None:
            logger.warning("the workers' Python could not be checked for its modules; continuing unchecked: %s", error)
            return
        raise InvalidInputError(
            f"the workers' Python ({context.pythonExec}) cannot run tasks: {sign}. {_remedy()}"
        ) from error
    for executable, missing in answers:
        if missing:
            raise InvalidInputError(
                f"the workers' Python {executable} lacks the modules {', '.join(missing)}, which the driver's "
                f"({sys.executable}) has. {_remedy()}"
            )


def _question() -> Callable[[Iterable[int]], Iterable[tuple[str, list[str]]]]:
    """Return a function for a Python without this package: nested functions are pickled by value."""
    modules = _MODULES

    def ask(_: Any) -> Iterator[tuple[str, list[str]]]:
        import importlib.util
        import sys

        yield sys.executable, [name for name in modules if importlib.util.find_spec(name) is None]

    return ask


def _remedy() -> str:
    chosen = os.environ.get("PYSPARK_PYTHON")
    return (
        f"Before the session starts, set PYSPARK_PYTHON (now {chosen or 'not set'}) to an interpreter that exists on "
        "every host and has the driver's packages, or install them there as for the driver, from a checkout or a wheel"
    )
