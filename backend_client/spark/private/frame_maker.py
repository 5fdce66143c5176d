"""
Makes the frames of a batch with few questions to the JVM.

PySpark asks the JVM for each list that it passes, for each element of it, for each column, and for a function's
surroundings, and once more to let go of each. And Spark parses each expression. Most of that is the same in every
batch: here it is made once, and kept in the JVM. The frames are those that the public methods of the same names make.

Expressions are kept for all sessions of an application, so they must mean the same under all settings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from inspect import signature
from typing import Any
from weakref import WeakKeyDictionary

import pyarrow as pa
from pyspark import SparkContext
from pyspark.serializers import CloudPickleSerializer
from pyspark.sql import DataFrame
from pyspark.sql.types import StructType
from pyspark.sql.udf import UserDefinedFunction
from pyspark.util import PythonEvalType

from backend_client.spark.private.session import java_session, needed

_SERVED_FRAMES = "making a batch's frames needs it, and there is no substitute"
_KEPT_MAX = 64
"""Lists and columns of each kind: a few for each operator; those with a batch's time in them are used once."""
_LOGICAL = "org.apache.spark.sql.catalyst.plans.logical"
_FUNCTION = "org.apache.spark.sql.execution.python.UserDefinedPythonFunction"
_PROFILES = ("spark.python.profile", "spark.python.profile.memory")

ArrowFunction = Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]


class FrameMaker:
    """
    Makes frames of one application; thread-safe.

    Args:
        context: The application.
    """

    def __init__(self, context: SparkContext) -> None:
        jvm: Any = context._jvm
        self._to_seq = jvm.PythonUtils.toSeq
        with needed("Column.as", _SERVED_FRAMES):
            self._functions = getattr(jvm, "org.apache.spark.sql.functions")
            self._contains = self._functions.contains
            self._wrap = getattr(jvm, "scala.Predef").genericWrapArray
            self._column = getattr(jvm, "org.apache.spark.sql.classic.ExpressionUtils").column
            self._parser = getattr(jvm, "org.apache.spark.sql.catalyst.parser.CatalystSqlParser")()
        with needed("QueryExecution.createSparkPlan", _SERVED_FRAMES):
            self._create_plan = getattr(jvm, "org.apache.spark.sql.execution.QueryExecution").createSparkPlan
            self._compiled = getattr(jvm, "org.apache.spark.sql.execution.WholeStageCodegenExec")
            self._filter, self._project = (getattr(jvm, f"{_LOGICAL}.{name}") for name in ("Filter", "Project"))
            self._is_not_null = getattr(jvm, "org.apache.spark.sql.catalyst.expressions.IsNotNull")
        self._python = _PythonFunctions(context)
        self._columns = lru_cache(_KEPT_MAX)(self._new_columns)
        self._expression = lru_cache(_KEPT_MAX)(self._new_expression)
        self._expressions = lru_cache(_KEPT_MAX)(self._new_expressions)
        self._beginning = lru_cache(_KEPT_MAX)(self._new_beginning)

    @classmethod
    def of(cls, frame: DataFrame) -> FrameMaker:
        """Return the one of a frame's application."""
        context = frame.sparkSession.sparkContext
        maker = _makers.get(context)
        if maker is None:
            maker = _makers[context] = cls(context)
        return maker

    def select_expr(self, frame: DataFrame, *expressions: str) -> DataFrame:
        """Return ``selectExpr`` of a frame."""
        with needed("Dataset.select", _SERVED_FRAMES):
            return self._made(frame, frame._jdf.select(self._expressions(expressions)))

    def repartition_by_id(self, frame: DataFrame, partitions: int, expression: str) -> DataFrame:
        """Return ``repartitionById`` of a frame, by an expression."""
        with needed("Dataset.repartitionById", _SERVED_FRAMES):
            return self._made(frame, frame._jdf.repartitionById(partitions, self._expression(expression)))

    def sort_within_partitions(self, frame: DataFrame, *columns: str) -> DataFrame:
        """Return ``sortWithinPartitions`` of a frame."""
        with needed("Dataset.sortWithinPartitions", _SERVED_FRAMES):
            return self._made(frame, frame._jdf.sortWithinPartitions(self._columns(columns)))

    def where(self, frame: DataFrame, condition: str) -> DataFrame:
        """Return ``where`` of a frame."""
        with needed("Dataset.filter", _SERVED_FRAMES):
            return self._made(frame, frame._jdf.filter(self._expression(condition)))

    def where_unlisted(self, frame: DataFrame, passed: str, value: str, listed: str, other: str) -> DataFrame:
        """
        Return ``where`` of a frame, by a condition of which only a text differs from batch to batch.

        Args:
            frame: The frame.
            passed: The condition for rows that stay.
            value: The text of other rows, which are left out if it is a part of `listed`.
            listed: The text.
            other: What is evaluated for all other rows: whether they stay.
        """
        with needed("Column.when", _SERVED_FRAMES):
            is_listed = self._contains(self._functions.lit(listed), self._expression(value))
            condition = self._beginning(passed).when(is_listed, False).otherwise(self._expression(other))
            return self._made(frame, frame._jdf.filter(condition))

    def drop(self, frame: DataFrame, column: str) -> DataFrame:
        """Return ``drop`` of a frame."""
        with needed("Dataset.drop", _SERVED_FRAMES):
            return self._made(frame, frame._jdf.drop(column))

    def aggregate(self, frame: DataFrame, groups: Sequence[str], aggregates: Sequence[str]) -> DataFrame:
        """Return ``groupBy`` and ``agg`` of a frame, by columns whose names have no dot."""
        first, *others = aggregates
        with needed("RelationalGroupedDataset.agg", _SERVED_FRAMES):
            grouped = frame._jdf.groupBy(self._columns(tuple(groups)))
            return self._made(frame, grouped.agg(self._expression(first), self._expressions(tuple(others))))

    def aggregate_apart(
        self, frame: DataFrame, expressions: Sequence[str], groups: Sequence[str], aggregates: Sequence[str]
    ) -> DataFrame | None:
        """
        Return `aggregate` of each partition alone: nothing is moved, and a group has a row in each.

        Spark adds the move of a group's rows to one partition when the rest of its plan is made: that step is left out.

        Args:
            frame: The frame.
            expressions: Columns beside those of the frame.
            groups: The columns by which it is grouped.
            aggregates: The aggregates, named.

        Returns:
            The groups and aggregates; None if Spark would not aggregate these in hash tables.
        """
        with needed("QueryExecution.sparkPlan", _SERVED_FRAMES):
            rows = self._of_rows(frame, frame._jdf.queryExecution().toRdd(), frame._jdf.schema())
            grouped = self.aggregate(self.select_expr(rows, *expressions, "*"), groups, aggregates)
            plan = grouped._jdf.queryExecution().sparkPlan()
            if plan.nodeName() != "HashAggregate":  # others rely on sorted rows
                return None
            return self._of_rows(frame, self._compiled(plan, 1).execute(), grouped._jdf.schema())

    def map_in_arrow(
        self, frame: DataFrame, names: tuple[str, ...], function: ArrowFunction, schema: StructType
    ) -> DataFrame:
        """
        Return ``mapInArrow`` of a frame.

        Args:
            frame: The frame.
            names: The names of its columns; none has a dot or a quote.
            function: The function.
            schema: The schema of its output.
        """
        column = self._python.column(frame.sparkSession.sparkContext, function, schema, self._columns(names))
        if column is None:
            return frame.mapInArrow(function, schema)
        with needed("Dataset.mapInArrow", _SERVED_FRAMES):
            return self._made(frame, frame._jdf.mapInArrow(column, False, None))

    def texts(self, kept: DataFrame) -> list[str]:
        """
        Compute a local checkpoint; return the values of its last column, of strings without line breaks, without nulls.

        Spark neither analyzes nor optimizes the plan, and counts it as no query of its own: its tasks have the settings
        that `session_settings` has set for them.
        """
        with needed("QueryExecution.createSparkPlan", _SERVED_FRAMES):
            rows, state = kept._jdf.queryExecution().analyzed(), java_session(kept.sparkSession).sessionState()
            columns = rows.output()
            found = self._filter(self._is_not_null(columns.last()), rows)
            plan = self._create_plan(state.planner(), self._project(columns.takeRight(1), found))
            compiled = self._compiled(plan, 1)  # one class for all, where each task would ask for three
            joined = str(self._wrap(compiled.executeCollectPublic()).mkString("\n"))
        return [row[1:-1] for row in joined.split("\n")] if joined else []

    def _of_rows(self, frame: DataFrame, rows: Any, schema: Any) -> DataFrame:
        """Return a frame of rows in Spark's internal form."""
        return self._made(frame, java_session(frame.sparkSession).internalCreateDataFrame(rows, schema, False))

    @staticmethod
    def _made(frame: DataFrame, java_frame: Any) -> DataFrame:
        return DataFrame(java_frame, frame.sparkSession)

    def _new_expression(self, expression: str) -> Any:
        return self._column(self._parser.parseExpression(expression))

    def _new_expressions(self, expressions: tuple[str, ...]) -> Any:
        return self._to_seq([self._new_expression(expression) for expression in expressions])

    def _new_beginning(self, condition: str) -> Any:
        return self._functions.when(self._new_expression(condition), True)

    def _new_columns(self, names: tuple[str, ...]) -> Any:
        return self._to_seq([self._functions.col(name) for name in names])


_makers: WeakKeyDictionary[SparkContext, FrameMaker] = WeakKeyDictionary()


class _PythonFunctions:
    """The facts that Spark needs about a Python function, apart from the function itself."""

    def __init__(self, context: SparkContext) -> None:
        jvm: Any = context._jvm
        with needed("UserDefinedPythonFunction", _SERVED_FRAMES):
            self._new_simple = jvm.SimplePythonFunction
            self._new_function = getattr(jvm, _FUNCTION)
            self._new_map, self._new_list = (getattr(jvm, f"java.util.{name}") for name in ("HashMap", "ArrayList"))
            self._inline_max = int(jvm.PythonUtils.getBroadcastThreshold(context._jsc))
        self._none = self._new_list()
        # PySpark 4.3 adds the function in SQL, and the categories of its inputs, which a function of batches has not.
        translates = "include_transpiled" in signature(UserDefinedFunction._create_judf).parameters
        self._more = (self._none, self._none) if translates else ()
        self._type = getattr(jvm, "org.apache.spark.sql.types.DataType")
        self._schema = lru_cache(_KEPT_MAX)(self._new_schema)
        self._is_profiled = any(context.getConf().get(name, "false") == "true" for name in _PROFILES)
        self._around: tuple[tuple[dict[str, str], list[str]], tuple[Any, Any]] | None = None

    def column(self, context: Any, function: ArrowFunction, schema: StructType, columns: Any) -> Any:
        """Return the call of a function, in the JVM; None for one that Spark sends in a way of its own."""
        command = CloudPickleSerializer().dumps((function, schema))  # type: ignore[no-untyped-call]
        if self._is_profiled or len(command) > self._inline_max:
            return None
        broadcasts = [broadcast._jbroadcast for broadcast in context._pickled_broadcast_vars] or self._none
        context._pickled_broadcast_vars.clear()
        with needed("UserDefinedPythonFunction", _SERVED_FRAMES):
            sums, (python, version) = context._javaAccumulator, (context.pythonExec, context.pythonVer)
            surroundings = self._surroundings(context)
            simple = self._new_simple(bytearray(command), *surroundings, python, version, broadcasts, sums)
            kind, name = PythonEvalType.SQL_MAP_ARROW_ITER_UDF, getattr(function, "__name__", type(function).__name__)
            made = self._new_function(name, simple, self._schema(schema.json()), kind, True, *self._more)
            return made.apply(columns)

    def _new_schema(self, text: str) -> Any:
        return self._type.fromJson(text)

    def _surroundings(self, context: Any) -> tuple[Any, Any]:
        """Return the environment and the files of Python workers, in the JVM; a user may add some at any time."""
        now = dict(context.environment), list(context._python_includes)
        if self._around is None or self._around[0] != now:
            self._around = now, (self._new_map(now[0]), self._new_list(now[1]))
        return self._around[1]
