"""
What is private in Spark's session, frames and plans, one function for each use.

Public classes of Spark come and go with a deprecation; these may change with any release. So nobody else reaches behind
Spark's classes (``tests/test_tidy.py``), every function is called by ``tests/e2e/test_private_interfaces.py`` on each
minor version that is served, and where a version has an interface no more, the error says so and names a way on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pyspark
from py4j.java_gateway import is_instance_of
from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from storage.errors import InvalidInputError

SERVED = "4.1 to 4.3"
"""The minor versions of PySpark that this is run on."""


@contextmanager
def needed(interface: str, instead: str) -> Iterator[None]:
    """
    Say clearly that an interface is not there: to be put around uses of it, and around nothing else.

    Args:
        interface: What is used.
        instead: What the user can do without it.

    Raises:
        InvalidInputError: This version of Spark does not have it, or has another of that name.
    """
    try:
        yield
    except (Py4JJavaError, PySparkException):  # the interface is there, and failed
        raise
    except (AttributeError, TypeError, ImportError, Py4JError) as error:
        raise InvalidInputError(
            f"PySpark {pyspark.__version__} does not have {interface} as PySpark {SERVED} have it: {instead}, or use "
            f"one of those versions ({type(error).__name__}: {error})"
        ) from error


_SERVED_VERSION = "what reads the query's plan needs it, and nothing stands in for it"


def is_classic(spark: Any) -> bool:
    """Say whether it is a session with a JVM beside this process, which Spark Connect has not."""
    return isinstance(spark, SparkSession) and getattr(spark, "_jsparkSession", None) is not None


def is_classic_grouped(grouped: Any) -> bool:
    """Say the same of the result of ``groupBy``."""
    return hasattr(grouped, "_jgd")


def session_id_of(spark: Any) -> str:
    """Return what tells a session from others of the same process."""
    with needed("SparkSession.sessionUUID", "call transform_with_state of the backend instead of install"):
        return str(spark._jsparkSession.sessionUUID())


def java_session(spark: SparkSession) -> Any:
    """Return the session in the JVM."""
    return spark._jsparkSession


def jvm_of(spark: SparkSession) -> Any:
    """Return the classes of the JVM."""
    return spark._jvm


def java_frame(frame: DataFrame) -> Any:
    """Return a frame in the JVM."""
    return frame._jdf


def is_a(spark: SparkSession, value: Any, class_name: str) -> bool:
    """Say whether an object of the JVM is of a class; it is not, where there is no such class."""
    try:
        return bool(is_instance_of(spark.sparkContext._gateway, value, class_name))
    except Py4JError:
        return False


def setting(spark: SparkSession, name: str, default: str) -> str:
    """Return a session's setting; `default` only where this version of Spark does not know the name."""
    try:
        value = spark.conf.get(name)
    except PySparkException:
        return default
    return default if value is None else str(value)


def hadoop_folder(spark: SparkSession, location: str) -> tuple[Any, Any]:
    """Return a folder as Hadoop's path, and the file system that has it."""
    with needed("SessionState.newHadoopConf", "the query's Spark checkpoint is read through it"):
        path = jvm_of(spark).org.apache.hadoop.fs.Path(location)
        return path, path.getFileSystem(spark._jsparkSession.sessionState().newHadoopConf())


def hadoop_path(spark: SparkSession, folder: Any, name: str) -> Any:
    """Return what has a name in a folder."""
    return jvm_of(spark).org.apache.hadoop.fs.Path(folder, name)


def catalog_table(spark: SparkSession, name: str) -> Any:
    """
    Return what Spark's own catalog knows of a table.

    Raises:
        PySparkException: It does not have it.
    """
    with needed("SessionCatalog.getTableMetadata", "use foreachBatch and write the batch with batch.writeTo(…)"):
        state = spark._jsparkSession.sessionState()
        return state.catalog().getTableMetadata(state.sqlParser().parseTableIdentifier(name))


def stream_side_nodes(frame: DataFrame) -> Iterator[tuple[str, str | None]]:
    """
    Yield the nodes of a frame's analyzed plan, each one's first child behind it: their names, and the types of joins.

    The first child of a join is the stream's side.
    """
    with needed("QueryExecution.analyzed", _SERVED_VERSION):
        node: Any = frame._jdf.queryExecution().analyzed()
        while True:
            name = str(node.nodeName())
            yield name, str(node.joinType()) if name == "Join" else None
            children = node.children()
            if children.isEmpty():
                return
            node = children.apply(0)


_COLUMNS = frozenset({"AttributeReference", "UnresolvedAttribute"})


def grouping_expressions(grouped: Any) -> Sequence[tuple[str, bool]]:
    """Return the expressions of a ``groupBy``: a name and True for a column, SQL and False for others."""
    with needed("RelationalGroupedDataset.groupingExprs", _SERVED_VERSION):
        expressions = grouped._jgd.groupingExprs()
        found = []
        for position in range(expressions.size()):
            expression = expressions.apply(position)
            is_column = str(expression.getClass().getSimpleName()) in _COLUMNS
            found.append((str(expression.name() if is_column else expression.sql()), is_column))
        return found


def grouped_frame(grouped: Any) -> DataFrame:
    """Return the frame that was grouped."""
    with needed("GroupedData._df", _SERVED_VERSION):
        frame: DataFrame = grouped._df
        return frame


def local_checkpoint(frame: DataFrame) -> Any:
    """Return the blocks in which Spark keeps a frame that ``localCheckpoint`` gave, as the JVM's RDD."""
    with needed("LogicalRDD.rdd", _SERVED_VERSION):
        return frame._jdf.queryExecution().analyzed().rdd()
