"""
Private interfaces of Spark's session, frames and plans, one function for each use.

Spark deprecates public classes before it removes them; private ones may change with any release. So no other package
uses them (``tests/test_tidy.py``), ``tests/e2e/test_private_interfaces.py`` calls every function on each supported
minor version, and if a version lacks an interface, the error says so and names an alternative.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import pyspark
from py4j.java_gateway import is_instance_of
from py4j.protocol import Py4JError, Py4JJavaError
from pyspark import SparkContext
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery

from storage.errors import InvalidInputError

SERVED = "4.1 to 4.3"
"""The supported minor versions of PySpark."""


@contextmanager
def needed(interface: str, instead: str) -> Iterator[None]:
    """
    Turn the failure of a missing private interface into a clear error; wrap only its uses.

    Args:
        interface: The interface that is used.
        instead: What the user can do without it.

    Raises:
        InvalidInputError: This version of Spark lacks the interface, or it has changed.
    """
    try:
        yield
    except (Py4JJavaError, PySparkException):  # the interface exists, and failed
        raise
    except (AttributeError, TypeError, ImportError, Py4JError) as error:
        raise InvalidInputError(
            f"PySpark {pyspark.__version__} lacks the interface {interface} of PySpark {SERVED}: {instead}, or use "
            f"one of those versions ({type(error).__name__}: {error})"
        ) from error


_SERVED_VERSION = "reading the query's plan needs it, and there is no substitute"


def is_classic(spark: Any) -> bool:
    """Return whether a session has a JVM on this host, unlike one of Spark Connect."""
    return isinstance(spark, SparkSession) and getattr(spark, "_jsparkSession", None) is not None


def is_classic_grouped(grouped: Any) -> bool:
    """Return whether the result of ``groupBy`` is of a session with a JVM on this host."""
    return hasattr(grouped, "_jgd")


def is_stopped(context: SparkContext) -> bool:
    """Return whether Spark has been stopped, by the program or by a failure: none of its jobs runs any more."""
    there: Any = context._jsc
    return there is None or bool(there.sc().isStopped())


def session_id_of(spark: Any) -> str:
    """Return a session's id, unique within the process."""
    with needed("SparkSession.sessionUUID", "call transform_with_state of the backend instead of install"):
        return str(spark._jsparkSession.sessionUUID())


def java_session(spark: SparkSession) -> Any:
    """Return the session in the JVM."""
    return spark._jsparkSession


def jvm_of(spark: SparkSession) -> Any:
    """Return the classes of the JVM."""
    return spark._jvm


def java_query(query: StreamingQuery) -> Any:
    """Return a query in the JVM."""
    return query._jsq


def java_frame(frame: DataFrame) -> Any:
    """Return a frame in the JVM."""
    return frame._jdf


def is_a(spark: SparkSession, value: Any, class_name: str) -> bool:
    """Return whether a JVM object is of a class; False if the class does not exist."""
    try:
        return bool(is_instance_of(spark.sparkContext._gateway, value, class_name))
    except Py4JError:
        return False


def setting(spark: SparkSession, name: str, default: str) -> str:
    """Return a session's setting; `default` only if this version of Spark does not know the name."""
    try:
        value = spark.conf.get(name)
    except PySparkException:
        return default
    return default if value is None else str(value)


def hadoop_folder(spark: SparkSession, location: str) -> tuple[Any, Any]:
    """Return a folder's Hadoop path and its file system."""
    with needed("SessionState.newHadoopConf", "reading the query's Spark checkpoint needs it"):
        path = _path_class(spark)(location)
        return path, path.getFileSystem(spark._jsparkSession.sessionState().newHadoopConf())


def hadoop_path(spark: SparkSession, folder: Any, name: str) -> Any:
    """Return the Hadoop path of a name in a folder."""
    return _path_class(spark)(folder, name)


def _path_class(spark: SparkSession) -> Any:
    """Return Hadoop's class by its whole name: for each part of it, Py4J would look for a class in all jars."""
    return getattr(jvm_of(spark), "org.apache.hadoop.fs.Path")


def catalog_table(spark: SparkSession, name: str) -> Any:
    """
    Return a table's metadata in Spark's own catalog.

    Raises:
        PySparkException: The catalog does not have the table.
    """
    with needed("SessionCatalog.getTableMetadata", "use foreachBatch and write the batch with batch.writeTo(…)"):
        state = spark._jsparkSession.sessionState()
        return state.catalog().getTableMetadata(state.sqlParser().parseTableIdentifier(name))


def stream_side_nodes(frame: DataFrame) -> Iterator[tuple[str, str | None]]:
    """
    Yield the nodes of a frame's analyzed plan, from the top along each first child: their names, and types of joins.

    The first child of a join is the stream's side. After a node come the expressions in it that are not deterministic.
    """
    with needed("QueryExecution.analyzed", _SERVED_VERSION):
        node: Any = frame._jdf.queryExecution().analyzed()
        while True:
            name = str(node.nodeName())
            yield name, str(node.joinType()) if name == "Join" else None
            if not node.deterministic():
                yield from ((expression, None) for expression in _changing(node.expressions()))
            children = node.children()
            if children.isEmpty():
                return
            node = children.apply(0)


def _changing(expressions: Any) -> Iterator[str]:
    """Yield the names of expressions, at any depth, that are not deterministic."""
    for position in range(expressions.size()):
        expression = expressions.apply(position)
        if not expression.deterministic():
            yield str(expression.nodeName())
            yield from _changing(expression.children())


def has_subquery(frame: DataFrame) -> bool:
    """Return whether a query is in an expression of a frame's plan: Spark makes a join of it, which may move rows."""
    with needed("QueryPlan.subqueriesAll", _SERVED_VERSION):
        return not frame._jdf.queryExecution().analyzed().subqueriesAll().isEmpty()


def stream_sources(frame: DataFrame) -> list[tuple[str, dict[str, str]]]:
    """
    Return the name and the options of each source of a stream, in the order in which an offsets entry has them.

    Options are known of sources of Spark's newer interface, Kafka's among them; of others they are empty.
    """
    with needed("StreamingRelationV2.extraOptions", "leave consumerGroup out"):
        return list(_stream_sources(frame._jdf.queryExecution().analyzed()))


def _stream_sources(node: Any) -> Iterator[tuple[str, dict[str, str]]]:
    children = node.children()
    for position in range(children.size()):
        yield from _stream_sources(children.apply(position))
    if children.isEmpty() and node.isStreaming():
        name = str(node.nodeName())
        if name != "StreamingRelationV2":
            yield name, {}
            return
        options = node.extraOptions().asCaseSensitiveMap()
        yield str(node.sourceName()), {str(key): str(options[key]) for key in options}


def grouping_kind(grouped: Any) -> str:
    """Return how rows were grouped: "GroupBy", "Rollup", "Cube", "GroupingSets" or "Pivot"."""
    with needed("RelationalGroupedDataset.toString", _SERVED_VERSION):
        text = str(grouped._jgd.toString())
    return text.rpartition("type: ")[2].rstrip("]")


def grouping_expressions(grouped: Any) -> Sequence[tuple[str, bool]]:
    """Return the expressions of a ``groupBy``: a name and True for a column, SQL and False for others."""
    with needed("RelationalGroupedDataset.groupingExprs", _SERVED_VERSION):
        expressions = grouped._jgd.groupingExprs()
        return [_grouping(expressions.apply(position), grouped._df) for position in range(expressions.size())]


def _grouping(expression: Any, frame: DataFrame) -> tuple[str, bool]:
    kind, text = str(expression.getClass().getSimpleName()), str(expression.sql())
    if kind == "UnresolvedAttribute":
        if expression.nameParts().size() == 1:
            return str(expression.nameParts().head()), True
        # A column of what is called so (``alias``), or a field of a struct.
        with suppress(Py4JError, PySparkException):  # the caller says what it has not found
            expression = frame._jdf.resolve(text)
            kind = str(expression.getClass().getSimpleName())
    if kind == "AttributeReference":
        return str(expression.name()), True
    return text, False


def grouped_frame(grouped: Any) -> DataFrame:
    """Return the frame that was grouped."""
    with needed("GroupedData._df", _SERVED_VERSION):
        frame: DataFrame = grouped._df
        return frame


def local_checkpoint(frame: DataFrame) -> Any:
    """Return the RDD, in the JVM, that holds a frame returned by ``localCheckpoint``."""
    with needed("LogicalRDD.rdd", _SERVED_VERSION):
        return frame._jdf.queryExecution().analyzed().rdd()
