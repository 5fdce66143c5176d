"""
The lazy result of a stateful operator, and the operations allowed on it before the query starts.

A streaming DataFrame cannot hold this backend's operator, so operations on its result are recorded and applied to
every batch. They are also applied at once to an empty *template* of the same schema: a wrong column name fails where it
is written, and `schema`, `columns` and ``df["column"]`` work as in Spark.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any

from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.types import StructType

from backend_client.spark.api.explain import describe
from backend_client.spark.api.operators import OperatorInput, TransformOptions, row_operator
from backend_client.spark.api.query_jobs import QueryJobs
from backend_client.spark.api.writer import StatefulStreamWriter
from backend_client.spark.columns import grouping_columns
from backend_client.spark.private.session import has_subquery, stream_side_nodes
from backend_client.spark.query import Operator, Query, Step
from storage.errors import InvalidInputError

# Operations on one row at a time: applied to each batch, they give the same result as applied to the whole stream.
STATELESS = (
    "alias",
    "coalesce",
    "colRegex",
    "drop",
    "dropna",
    "fillna",
    "filter",
    "hint",
    "join",
    "mapInArrow",
    "mapInPandas",
    "melt",
    "repartition",
    "repartitionByRange",
    "replace",
    "select",
    "selectExpr",
    "to",
    "toDF",
    "unpivot",
    "where",
    "withColumn",
    "withColumnRenamed",
    "withColumns",
    "withColumnsRenamed",
    "withMetadata",
)

_REMEMBER = "remember seen rows in a value state of another processor"
_AGGREGATE = "aggregate in another processor: groupBy(…).transformWithState(…)"
_STATEFUL = {
    "agg": _AGGREGATE,
    "count": _AGGREGATE,
    "cube": _AGGREGATE,
    "distinct": _REMEMBER,
    "dropDuplicates": _REMEMBER,
    "dropDuplicatesWithinWatermark": _REMEMBER,
    "drop_duplicates": _REMEMBER,
    "limit": "count in another processor",
    "rollup": _AGGREGATE,
    "union": "union the streams before the operator",
    "unionAll": "union the streams before the operator",
    "unionByName": "union the streams before the operator",
}
_IN_ITS_PLACE = {
    "observe": "observe the operator's input; backend.on_progress(…) has the figures of each batch",
    "withWatermark": "call it before the operator, and name the result's column of time with eventTimeColumnName=…",
    **dict.fromkeys(
        ("createOrReplaceGlobalTempView", "createOrReplaceTempView", "createGlobalTempView", "createTempView"),
        "SQL cannot read the result: use selectExpr and filter, or a view of the batch inside foreachBatch",
    ),
}


class StatefulGroupedData:
    """The result of ``groupBy`` on the result of a stateful operator; input of the next ``transform_with_state``."""

    def __init__(self, given: OperatorInput, jobs: QueryJobs) -> None:
        self.input = given
        self.jobs = jobs

    def transformWithState(self, statefulProcessor: StatefulProcessor, *args: Any, **kwargs: Any) -> StatefulDataFrame:
        """Add the next operator, as in Spark. Its name is the processor's class name, numbered if that is taken."""
        name = self._free_name(statefulProcessor)
        options = TransformOptions(statefulProcessor, *args, **kwargs, name=name)
        return self.followed_by(replace(row_operator(self.input, options), is_named=False))

    def transformWithStateInPandas(
        self, statefulProcessor: StatefulProcessor, *args: Any, **kwargs: Any
    ) -> StatefulDataFrame:
        """Add the next operator, of the pandas API; otherwise like `transformWithState`."""
        name = self._free_name(statefulProcessor)
        options = TransformOptions(statefulProcessor, *args, **kwargs, name=name, pandas=True)
        return self.followed_by(replace(row_operator(self.input, options), is_named=False))

    def followed_by(self, operator: Operator) -> StatefulDataFrame:
        """Return the result of an operator that was built for this input."""
        query = self.input.query
        template = query.spark.createDataFrame([], operator.output_schema)
        return StatefulDataFrame(replace(query, operators=(*query.operators, operator), steps=()), template, self.jobs)

    def _free_name(self, processor: StatefulProcessor) -> str:
        taken, name = {operator.name for operator in self.input.query.operators}, type(processor).__name__
        numbered = (f"{name}-{number}" for number in count(2))
        return name if name not in taken else next(free for free in numbered if free not in taken)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{name!r} is not available here: a grouped stateful result only has transformWithState and "
            "transformWithStateInPandas; aggregate in a processor, or inside foreachBatch"
        )


class StatefulDataFrame:
    """
    The result of ``transform_with_state``: a streaming DataFrame in all but its class.

    Stateless DataFrame operations return a new result; ``groupBy`` prepares the next operator; ``writeStream`` starts
    the query.
    """

    def __init__(self, query: Query, template: DataFrame, jobs: QueryJobs) -> None:
        self._query = query
        self._template = template
        self._jobs = jobs

    isStreaming = True

    @property
    def statefulQuery(self) -> Query:
        """The query that the driver runs, as a value."""
        return self._query

    @property
    def sparkSession(self) -> SparkSession:
        """The session of the input."""
        return self._query.spark

    @property
    def schema(self) -> StructType:
        """The schema of the rows."""
        return self._template.schema

    @property
    def columns(self) -> list[str]:
        """The names of the columns."""
        return self._template.columns

    @property
    def dtypes(self) -> list[tuple[str, str]]:
        """Names and types of the columns."""
        return self._template.dtypes

    def printSchema(self) -> None:
        """Print the schema."""
        self._template.printSchema()

    def explain(self, extended: Any = None, mode: str | None = None) -> None:
        """Print the operators and their state, then Spark's plan of the input; arguments as in Spark."""
        sys.stdout.write(describe(self._query))
        self._query.source.explain(extended, mode)

    def transform(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Apply a function to this result, for chained calls."""
        return func(self, *args, **kwargs)

    def groupBy(self, *cols: str | Column | list[str | Column]) -> StatefulGroupedData:
        """Group by columns, for the next operator."""
        names = cols[0] if len(cols) == 1 and isinstance(cols[0], list) else cols
        key_columns = grouping_columns(self._template.groupBy(*names))
        return StatefulGroupedData(OperatorInput(self._query, self.schema, key_columns), self._jobs)

    groupby = groupBy

    @property
    def na(self) -> SimpleNamespace:
        """The functions for nulls, as of Spark's ``DataFrame.na``: ``na.drop``, ``na.fill`` and ``na.replace``."""
        return SimpleNamespace(drop=self.dropna, fill=self.fillna, replace=self.replace)

    @property
    def writeStream(self) -> StatefulStreamWriter:
        """The writer of this stream, with the methods of Spark's ``DataStreamWriter``."""
        return StatefulStreamWriter(self._query, self.schema, self._jobs)

    def __getitem__(self, name: Any) -> Any:
        if isinstance(name, str):
            self._template[name]  # an unknown column is an error here, as in Spark
            return F.col(name)
        if isinstance(name, (list, tuple)):
            return self.select(*name)
        return self.filter(name)

    def __getattr__(self, name: str) -> Any:
        if name == "_jdf":
            raise InvalidInputError(
                "Spark's own operations (union, a join with another stream) cannot take the result of a stateful "
                "operator of this backend: union streams before the operator, join static DataFrames with "
                "result.join(static, …), and use foreachBatch for the rest"
            )
        if name.startswith("_"):
            raise AttributeError(name)
        if name in STATELESS:
            return self._recorder(name)
        if name in self._template.columns:
            return F.col(name)
        if name in _STATEFUL:
            raise AttributeError(
                f"{name!r} is one of Spark's own stateful operations, which cannot follow an operator of this backend: "
                f"{_STATEFUL[name]}, or use foreachBatch"
            )
        if name in _IN_ITS_PLACE:
            raise AttributeError(
                f"{name!r} is not available on the result of a stateful operator: {_IN_ITS_PLACE[name]}"
            )
        raise AttributeError(
            f"{name!r} is not available on the result of a stateful operator; use a stateless operation "
            f"({', '.join(STATELESS)}), or foreachBatch, which gives each batch as an ordinary DataFrame"
        )

    def _recorder(self, name: str) -> Callable[..., StatefulDataFrame]:
        def record(*args: Any, **kwargs: Any) -> StatefulDataFrame:
            for value in (*args, *kwargs.values()):
                if isinstance(value, StatefulDataFrame) or (isinstance(value, DataFrame) and value.isStreaming):
                    raise InvalidInputError(
                        f"{name} of a stateful result with another stream would be a stateful operation; union the "
                        "streams before the operator and join them in its processor"
                    )

            step = Step(name, args, kwargs)
            # Only the schema of a function's result matters here. In a plan, Spark would pickle and keep the function.
            template = _applied(step.with_function(lambda _: _same), self._template)
            _refuse_stateful(name, template)
            step = replace(step, has_subquery=has_subquery(template))
            query = replace(self._query, steps=(*self._query.steps, step))
            return StatefulDataFrame(query, template, self._jobs)

        return record


def _same(batches: Any) -> Any:
    return batches


def _applied(step: Step, template: DataFrame) -> DataFrame:
    """
    Return a step's result.

    Raises:
        InvalidInputError: A join's condition has a column of the result that the other side has, too.
    """
    try:
        return step(template)
    except AnalysisException as error:
        if step.name != "join" or error.getCondition() != "AMBIGUOUS_REFERENCE":
            raise
        raise InvalidInputError(
            "join: columns of a stateful result are found by their names, and the other side has the same name "
            f"({error}). Join on the name, such as on='k', or name both sides: "
            "result.alias('r').join(other.alias('o'), F.expr('r.k = o.k'))"
        ) from error


_LOOKS_AT_MANY_ROWS = {
    "Aggregate": f"an aggregate function over all rows would see only one batch: {_AGGREGATE}",
    "Window": f"a window function would see only one batch: {_REMEMBER}",
    "monotonically_increasing_id": "monotonically_increasing_id would restart in every batch: number in a processor",
}
_JOINS_OF_STATIC_ROWS = {"RightOuter", "FullOuter"}


def _refuse_stateful(name: str, frame: DataFrame) -> None:
    """
    Refuse a step that is stateless by name but reads more than one row of the stream.

    Raises:
        InvalidInputError: Its result batch by batch would differ from that on the whole stream.
    """
    for kind, join_type in stream_side_nodes(frame):
        if kind in _LOOKS_AT_MANY_ROWS:
            raise InvalidInputError(f"{name}: {_LOOKS_AT_MANY_ROWS[kind]}, or use foreachBatch")
        if kind == "Join" and join_type in _JOINS_OF_STATIC_ROWS:
            raise InvalidInputError(
                f"{name}: a right or full outer join would emit the static rows without a partner in every batch; "
                "join 'inner', 'left', 'left_semi' or 'left_anti', or use foreachBatch"
            )
