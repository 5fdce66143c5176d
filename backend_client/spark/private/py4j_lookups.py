"""
Keeps the classes and methods that PySpark looks up in the JVM for each call.

Py4J asks the JVM for a class, and for each static method, whenever they are named, and a class without a package is
looked for in all imported ones: a fifth of the round trips of a small batch. A kept class or method is an attribute of
the object that is asked, and found there first.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from py4j.protocol import Py4JError
from pyspark.sql import SparkSession

_NAMED = {
    "PythonUtils": ("toSeq", "toArray", "toList", "getBroadcastThreshold"),
    "SimplePythonFunction": (),
    "functions": ("col", "expr", "lit"),
    "org.apache.hadoop.fs.Path": (),
    "org.apache.spark.sql.catalyst.trees.PySparkCurrentOrigin": ("set", "clear"),
    "org.apache.spark.sql.classic.SparkSession": ("getActiveSession", "getDefaultSession"),
    "org.apache.spark.sql.execution.python.UserDefinedPythonFunction": (),
    "org.apache.spark.sql.functions": ("col", "expr", "lit"),
}
"""Classes, as PySpark names them, and their static methods."""


def keep_lookups(spark: SparkSession) -> None:
    """Keep what this version of PySpark has of them; the rest is looked up as before."""
    jvm: Any = spark._jvm
    for name, methods in _NAMED.items():
        with suppress(Py4JError, TypeError):
            kept = getattr(jvm, name)
            for method in methods:
                with suppress(Py4JError):
                    setattr(kept, method, getattr(kept, method))
            if type(kept).__name__ == "JavaClass":  # a name without a class may become one of a package
                setattr(jvm, name, kept)
