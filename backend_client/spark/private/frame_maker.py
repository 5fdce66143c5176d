"""
Makes the frames of a batch with few questions to the JVM.

PySpark asks the JVM for each list that it passes, for each element of it, for each column, and for a function's
surroundings, and once more to let go of each. And Spark parses each expression. Most of that is the same in every
batch: here it is made once, and kept in the JVM. And Spark analyzes the plan after each step, which takes as long for
one as for several: `Steps` are analyzed together. The frames are those that the public methods of the same names make.

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
_CATALYST = "org.apache.spark.sql.catalyst"
_LOGICAL = f"{_CATALYST}.plans.logical"
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
            converter = getattr(jvm, "org.apache.spark.sql.classic.ColumnNodeToExpressionConverter$")
            self._converted = getattr(converter, "MODULE$").apply
            self._parser = getattr(jvm, f"{_CATALYST}.parser.CatalystSqlParser")()
        with needed("QueryExecution.createSparkPlan", _SERVED_FRAMES):
            self._create_plan = getattr(jvm, "org.apache.spark.sql.execution.QueryExecution").createSparkPlan
            self._compiled = getattr(jvm, "org.apache.spark.sql.execution.WholeStageCodegenExec")
            self._is_not_null = getattr(jvm, f"{_CATALYST}.expressions.IsNotNull")
        self.nodes = _Nodes(jvm)
        self.python = _PythonFunctions(context)
        self.expressions = lru_cache(_KEPT_MAX)(self._new_expressions)
        self.moves = lru_cache(_KEPT_MAX)(self._new_moves)
        self.orders = lru_cache(_KEPT_MAX)(self._new_orders)
        self.columns = lru_cache(_KEPT_MAX)(self._new_columns)
        self._column_of = lru_cache(_KEPT_MAX)(self._new_column)
        self._columns_of = lru_cache(_KEPT_MAX)(self._new_columns_of)
        self._beginning = lru_cache(_KEPT_MAX)(self._new_beginning)

    @classmethod
    def of(cls, frame: DataFrame) -> FrameMaker:
        """Return the one of a frame's application."""
        context = frame.sparkSession.sparkContext
        maker = _makers.get(context)
        if maker is None:
            maker = _makers[context] = cls(context)
        return maker

    def steps(self, frame: DataFrame) -> Steps:
        """Return a frame to which steps can be added."""
        return Steps(self, frame)

    def expression_of(self, column: Any) -> Any:
        """Return the expression of a column of the JVM."""
        return self._converted(column.node())

    def unlisted(self, passed: str, value: str, listed: str, other: str) -> Any:
        """Return the condition of `Steps.where_unlisted`, in the JVM."""
        is_listed = self._contains(self._functions.lit(listed), self._column_of(value))
        return self.expression_of(self._beginning(passed).when(is_listed, False).otherwise(self._column_of(other)))

    def aggregate(self, frame: DataFrame, groups: Sequence[str], aggregates: Sequence[str]) -> DataFrame:
        """Return ``groupBy`` and ``agg`` of a frame, by columns whose names have no dot."""
        first, *others = aggregates
        with needed("RelationalGroupedDataset.agg", _SERVED_FRAMES):
            grouped = frame._jdf.groupBy(self.columns(tuple(groups)))
            return self._made(frame, grouped.agg(self._column_of(first), self._columns_of(tuple(others))))

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
            grouped = self.aggregate(self.steps(rows).select_expr(*expressions, "*").frame(), groups, aggregates)
            plan = grouped._jdf.queryExecution().sparkPlan()
            if plan.nodeName() != "HashAggregate":  # others rely on sorted rows
                return None
            return self._of_rows(frame, self._compiled(plan, 1).execute(), grouped._jdf.schema())

    def texts(self, kept: DataFrame) -> list[str]:
        """
        Compute a local checkpoint; return the values of its last column, of strings without line breaks, without nulls.

        Spark neither analyzes nor optimizes the plan, and counts it as no query of its own: its tasks have the settings
        that `session_settings` has set for them.
        """
        with needed("QueryExecution.createSparkPlan", _SERVED_FRAMES):
            rows, state = kept._jdf.queryExecution().analyzed(), java_session(kept.sparkSession).sessionState()
            columns = rows.output()
            found = self.nodes.filter(self._is_not_null(columns.last()), rows)
            plan = self._create_plan(state.planner(), self.nodes.project(columns.takeRight(1), found))
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
        return self._parser.parseExpression(expression)

    def _new_expressions(self, expressions: tuple[str, ...]) -> Any:
        return self._to_seq([self._new_expression(expression) for expression in expressions])

    def _new_moves(self, partition: str) -> Any:
        return self._to_seq([self.nodes.partition_id(self._new_expression(partition))])

    def _new_orders(self, columns: tuple[str, ...]) -> Any:
        return self._to_seq([self.nodes.ascending(name) for name in columns])

    def _new_columns(self, names: tuple[str, ...]) -> Any:
        return self._to_seq([self._functions.col(name) for name in names])

    def _new_column(self, expression: str) -> Any:
        return self._column(self._new_expression(expression))

    def _new_columns_of(self, expressions: tuple[str, ...]) -> Any:
        return self._to_seq([self._new_column(expression) for expression in expressions])

    def _new_beginning(self, condition: str) -> Any:
        return self._functions.when(self._new_column(condition), True)


_makers: WeakKeyDictionary[SparkContext, FrameMaker] = WeakKeyDictionary()


class Steps:
    """
    A frame to which steps are added, each as by the frame's method of its name; Spark analyzes all of them together.

    Args:
        maker: Makes the steps.
        frame: The frame.
    """

    def __init__(self, maker: FrameMaker, frame: DataFrame) -> None:
        self._maker = maker
        self._spark = frame.sparkSession
        with needed("Dataset.logicalPlan", _SERVED_FRAMES):
            self._plan: Any = frame._jdf.logicalPlan()

    def frame(self) -> DataFrame:
        """Return the frame with its steps."""
        with needed("Dataset.ofRows", _SERVED_FRAMES):
            made = self._maker.nodes.of_rows(java_session(self._spark), self._plan)
            return DataFrame(made, self._spark)

    def select_expr(self, *expressions: str) -> Steps:
        """Add ``selectExpr``; each is a column, has a name, or is a star."""
        with needed("Project", _SERVED_FRAMES):
            self._plan = self._maker.nodes.project(self._maker.expressions(expressions), self._plan)
        return self

    def repartition_by_id(self, partitions: int, expression: str) -> Steps:
        """Add ``repartitionById``, by an expression."""
        with needed("RepartitionByExpression", _SERVED_FRAMES):
            self._plan = self._maker.nodes.repartition(self._maker.moves(expression), self._plan, partitions)
        return self

    def sort_within_partitions(self, *columns: str) -> Steps:
        """Add ``sortWithinPartitions``."""
        with needed("Sort", _SERVED_FRAMES):
            self._plan = self._maker.nodes.sort(self._maker.orders(columns), self._plan)
        return self

    def where_unlisted(self, passed: str, value: str, listed: str, other: str) -> Steps:
        """
        Add ``where``, with a condition of which only a text differs from batch to batch.

        Args:
            passed: The condition for rows that stay.
            value: The text of other rows, which are left out if it is a part of `listed`.
            listed: The text.
            other: What is evaluated for all other rows: whether they stay.
        """
        with needed("Filter", _SERVED_FRAMES):
            self._plan = self._maker.nodes.filter(self._maker.unlisted(passed, value, listed, other), self._plan)
        return self

    def drop_last(self) -> Steps:
        """Add ``drop`` of the last column; the steps before have kept the frame's columns."""
        with needed("Project", _SERVED_FRAMES):
            self._plan = self._maker.nodes.project(self._plan.output().dropRight(1), self._plan)
        return self

    def map_in_arrow(self, names: tuple[str, ...], function: ArrowFunction, schema: StructType) -> DataFrame:
        """
        Return the frame after ``mapInArrow``.

        Args:
            names: The names of its columns; none has a dot or a quote.
            function: The function.
            schema: The schema of its output.
        """
        maker, context = self._maker, self._spark.sparkContext
        column = maker.python.column(context, function, schema, maker.columns(names))
        if column is None:
            return self.frame().mapInArrow(function, schema)
        with needed("MapInArrow", _SERVED_FRAMES):
            self._plan = maker.nodes.map_in_arrow(maker.expression_of(column), maker.python.type_of(schema), self._plan)
        return self.frame()


class _Nodes:
    """Makes nodes of plans that Spark has not analyzed yet."""

    def __init__(self, jvm: Any) -> None:
        with needed("plans.logical", _SERVED_FRAMES):
            self.filter, self.project, self._sort, self._map_in_arrow = (
                getattr(jvm, f"{_LOGICAL}.{name}") for name in ("Filter", "Project", "Sort", "MapInArrow")
            )
            self.repartition = getattr(getattr(jvm, f"{_LOGICAL}.RepartitionByExpression$"), "MODULE$").apply
            self.partition_id = getattr(jvm, f"{_CATALYST}.expressions.DirectShufflePartitionID")
            self._attribute = getattr(jvm, f"{_CATALYST}.analysis.UnresolvedAttribute").quotedString
            names = ("SortOrder", "Ascending")
            self._order, self._up = (
                getattr(getattr(jvm, f"{_CATALYST}.expressions.{name}$"), "MODULE$") for name in names
            )
            self._to_attributes = getattr(jvm, f"{_CATALYST}.types.DataTypeUtils").toAttributes
            self.of_rows = getattr(jvm, "org.apache.spark.sql.classic.Dataset").ofRows
            self._none = getattr(jvm, "scala.Option").empty()

    def ascending(self, column: str) -> Any:
        """Return the order by a column."""
        return self._order.apply(self._attribute(column), self._up, getattr(self._order, "apply$default$3")())

    def sort(self, orders: Any, plan: Any) -> Any:
        """Return a sort of each partition."""
        return self._sort(orders, False, plan, self._none)

    def map_in_arrow(self, function: Any, schema: Any, plan: Any) -> Any:
        """Return a call of a Python function, with the attributes of its output's schema."""
        return self._map_in_arrow(function, self._to_attributes(schema), plan, False, self._none)


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
        self._type_of = lru_cache(_KEPT_MAX)(self._new_type)
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
            made = self._new_function(name, simple, self.type_of(schema), kind, True, *self._more)
            return made.apply(columns)

    def type_of(self, schema: StructType) -> Any:
        """Return a schema in the JVM."""
        return self._type_of(schema.json())

    def _new_type(self, text: str) -> Any:
        return self._type.fromJson(text)

    def _surroundings(self, context: Any) -> tuple[Any, Any]:
        """Return the environment and the files of Python workers, in the JVM; a user may add some at any time."""
        now = dict(context.environment), list(context._python_includes)
        if self._around is None or self._around[0] != now:
            self._around = now, (self._new_map(now[0]), self._new_list(now[1]))
        return self._around[1]
