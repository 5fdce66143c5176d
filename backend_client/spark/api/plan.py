"""
The lazy result of a stateful operator: what a user may still do with it before the query starts.

A streaming DataFrame cannot hold this backend's operator, so the operations on its result are recorded and applied to
every batch. They are also applied at once to an empty *template* of the same schema, so that a wrong column name is an
error where it is written, and `schema`, `columns` and ``df["column"]`` work as ever.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, Any

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.types import DoubleType, FloatType, StructField, StructType

from backend_client.batch_time import TimeMode
from backend_client.key_groups import order_expression, partition_expression
from backend_client.spark.api.explain import describe
from backend_client.spark.private.session import grouped_frame, grouping_expressions, setting, stream_side_nodes
from backend_client.spark.task.late_rows import EventTime, EventTimes, event_time_of
from dstl_service.wire import StateInfo
from storage.errors import InvalidInputError

if TYPE_CHECKING:
    from backend_client.spark.api.backend import ChangelogStateBackend
    from backend_client.spark.api.writer import StatefulStreamWriter
    from backend_client.spark.driver.initial_state import InitialState
    from backend_client.spark.task.columnar_calls import ColumnarPlan

Pin = Callable[[DataFrame, str, int], DataFrame]

ORDER_COLUMN = "__dstl_order"
_KEY_COLUMN = "__dstl_key_"
_NOT_EARLY_COLUMN = f"{_KEY_COLUMN}not_early"
_PARTITION_COLUMN = "__dstl_partition"

# Operations that look at one row at a time, so that applying them batch by batch is applying them to the stream.
STATELESS = (
    "alias",
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

_REMEMBER = "remember what was seen in a value state of a further processor"
_AGGREGATE = "aggregate in a further processor: groupBy(…).transformWithState(…)"
_STATEFUL = {
    "agg": _AGGREGATE,
    "count": _AGGREGATE,
    "cube": _AGGREGATE,
    "distinct": _REMEMBER,
    "dropDuplicates": _REMEMBER,
    "dropDuplicatesWithinWatermark": _REMEMBER,
    "drop_duplicates": _REMEMBER,
    "limit": "count in a further processor",
    "rollup": _AGGREGATE,
    "union": "union the streams before the operator",
    "unionAll": "union the streams before the operator",
    "unionByName": "union the streams before the operator",
}


@dataclass(frozen=True, slots=True)
class Step:
    """A call of a DataFrame's method that was recorded."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __call__(self, frame: DataFrame) -> DataFrame:
        """Call the method of a frame."""
        result: DataFrame = getattr(frame, self.name)(*self.args, **self.kwargs)
        return result

    def with_function(self, change: Callable[[Any], Any]) -> Step:
        """Return the same with another function in place of the user's; without one, it is itself."""
        if self.name not in ("mapInArrow", "mapInPandas"):
            return self
        if self.args:
            return replace(self, args=(change(self.args[0]), *self.args[1:]))
        return replace(self, kwargs={**self.kwargs, "func": change(self.kwargs["func"])}) if self.kwargs else self


@dataclass(frozen=True, slots=True)
class Operator:
    """One stateful operator of a query, with the stateless steps between the operator before it and its input."""

    name: str
    processor: StatefulProcessor | ColumnarPlan
    key_columns: tuple[str, ...]
    input_schema: StructType
    output_schema: StructType
    states: dict[str, StateInfo]
    parallelism: int | None
    steps: tuple[Step, ...]
    pandas: bool = False
    initial: InitialState | None = None
    begin_anew: frozenset[str] = frozenset()
    """States that begin anew with every batch, for ``init`` deletes them before it asks for them."""
    order: tuple[str, ...] = ()
    """Columns by which the rows of a key are sorted."""
    time_mode: TimeMode = TimeMode.NONE
    output_mode: str = "Update"

    @property
    def key_schema(self) -> StructType:
        """The grouping columns, in the order of ``groupBy``."""
        return StructType([self.input_schema[name] for name in self.key_columns])

    @property
    def event_time(self) -> EventTime | None:
        """A row's event time, None if that is no matter here."""
        return event_time_of(self.input_schema, self.name) if self.time_mode is TimeMode.EVENT else None

    @property
    def key_places(self) -> tuple[int | None, ...]:
        """Where among the input's columns each key column is; None for one that `place` adds, in its normal form."""
        names = self.input_schema.names
        return tuple(
            None if _has_normal_form(self.input_schema[name]) else names.index(name) for name in self.key_columns
        )

    def place(
        self, frame: DataFrame, parallelism: int, max_parallelism: int, pin: Pin | None, times: EventTimes | None = None
    ) -> DataFrame:
        """
        Return the rows at their partitions, sorted by key group and a hash of the key.

        Columns: the number by which rows are sorted, the key columns that are none of the input's (`key_places`), then
        the columns of `frame`. Spark sorts, and spills what does not fit. With `times`, late rows have the complement
        of their number, which is negative, for `late_rows.LateRowFilter`; and where rows may be early, another column before
        those of `frame` says which are not, for `KeyVisits`. Rows of a key come in that order, or in `order`; keys of
        one number come mixed, for `KeySeparator`.

        Args:
            frame: The rows.
            parallelism: Number of partitions.
            max_parallelism: Number of key groups.
            pin: Keeps partitions with executors; takes rows, the name of their partition column and `parallelism`.
                None where there is nothing to keep.
            times: Divides the rows by event time.
        """
        fields = [self.input_schema[name] for name in self.key_columns]
        order = order_expression([_normal_key(field) for field in fields], max_parallelism)
        added = {f"{_KEY_COLUMN}{at}": _normal_key(field) for at, field in enumerate(fields) if _has_normal_form(field)}
        within_key, time = self.order, self.event_time
        if times is not None and time is not None:
            order = f"if({time.until(times.late_until_ms)}, ~({order}), {order})"
            if times.early_until_ms is not None:
                added[_NOT_EARLY_COLUMN] = f"not {time.until(times.early_until_ms)}"
                within_key = (_NOT_EARLY_COLUMN, *within_key)
        keyed = frame.selectExpr(
            f"{order} as {ORDER_COLUMN}",
            *(f"{expression} as {name}" for name, expression in added.items()),
            "*",
        )
        partition = F.expr(partition_expression(ORDER_COLUMN, parallelism, max_parallelism))
        if pin is None:
            placed = keyed.repartitionById(parallelism, partition)
        else:
            placed = keyed.withColumn(_PARTITION_COLUMN, partition).repartitionById(parallelism, _PARTITION_COLUMN)
            placed = pin(placed, _PARTITION_COLUMN, parallelism).drop(_PARTITION_COLUMN)
        return placed.sortWithinPartitions(ORDER_COLUMN, *within_key)


class StatefulGroupedData:
    """The result of ``groupBy`` on the result of a stateful operator; input of the next ``transform_with_state``."""

    def __init__(self, frame: StatefulDataFrame, key_columns: tuple[str, ...]) -> None:
        self.frame = frame
        self.key_columns = key_columns

    def transformWithState(self, statefulProcessor: StatefulProcessor, *args: Any, **kwargs: Any) -> StatefulDataFrame:
        """Add the next operator: Spark's method. It is named by its processor's class, numbered if that is taken."""
        name = self._free_name(statefulProcessor)
        return self.frame.backend.transform_with_state(self, statefulProcessor, *args, **kwargs, name=name)

    def transformWithStateInPandas(
        self, statefulProcessor: StatefulProcessor, *args: Any, **kwargs: Any
    ) -> StatefulDataFrame:
        """Add the next operator, of the pandas API; as `transformWithState`."""
        name = self._free_name(statefulProcessor)
        return self.frame.backend.transform_with_state_in_pandas(self, statefulProcessor, *args, **kwargs, name=name)

    def _free_name(self, processor: StatefulProcessor) -> str:
        taken, name = {operator.name for operator in self.frame.operators}, type(processor).__name__
        numbered = (f"{name}-{number}" for number in count(2))
        return name if name not in taken else next(free for free in numbered if free not in taken)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{name!r} is not available here: the result of a stateful operator can be grouped only for "
            "transformWithState and transformWithStateInPandas; aggregate in a processor, or inside foreachBatch"
        )


class StatefulDataFrame:
    """
    The result of ``transform_with_state``: a streaming DataFrame in all but its class.

    Stateless DataFrame operations return another one; ``groupBy`` leads to a further operator; ``writeStream`` starts
    the query.
    """

    def __init__(
        self,
        backend: ChangelogStateBackend,
        source: DataFrame,
        operators: tuple[Operator, ...],
        template: DataFrame,
        steps: tuple[Step, ...] = (),
    ) -> None:
        self.backend = backend
        self.source = source
        self.operators = operators
        self.steps = steps
        self._template = template

    isStreaming = True

    def on(self, backend: ChangelogStateBackend) -> StatefulDataFrame:
        """Return the same with another backend, as long as no query runs."""
        return StatefulDataFrame(backend, self.source, self.operators, self._template, self.steps)

    @property
    def sparkSession(self) -> SparkSession:
        """The session of the input."""
        return self.source.sparkSession

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
        """Print the operators and their state, then Spark's plan of the input, with Spark's arguments."""
        sys.stdout.write(describe(self))
        self.source.explain(extended, mode)

    def transform(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Apply a function to this result, for chains of calls."""
        return func(self, *args, **kwargs)

    def groupBy(self, *cols: str | Column | list[str | Column]) -> StatefulGroupedData:
        """Group by columns, for the next operator."""
        names = cols[0] if len(cols) == 1 and isinstance(cols[0], list) else cols
        return StatefulGroupedData(self, grouping_columns(self._template.groupBy(*names)))

    groupby = groupBy

    @property
    def writeStream(self) -> StatefulStreamWriter:
        """The writer of this stream, with the methods of Spark's ``DataStreamWriter``."""
        from backend_client.spark.api.writer import StatefulStreamWriter

        return StatefulStreamWriter(self)

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
                "the result of a stateful operator of this backend is no DataFrame that Spark's own operations (union, "
                "a join with another stream) can take: union streams before the operator, join static DataFrames by "
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
                f"{name!r} is a stateful operation of Spark's own, which cannot follow an operator of this backend: "
                f"{_STATEFUL[name]}, or use foreachBatch"
            )
        raise AttributeError(
            f"{name!r} is not available on the result of a stateful operator; stateless operations are "
            f"({', '.join(STATELESS)}), and foreachBatch gives each batch as an ordinary DataFrame"
        )

    def _recorder(self, name: str) -> Callable[..., StatefulDataFrame]:
        def record(*args: Any, **kwargs: Any) -> StatefulDataFrame:
            for value in (*args, *kwargs.values()):
                if isinstance(value, StatefulDataFrame) or (isinstance(value, DataFrame) and value.isStreaming):
                    raise InvalidInputError(
                        f"{name} of a stateful result with another stream would be a stateful operation; union the "
                        "streams before the operator, and let its processor join them"
                    )

            step = Step(name, args, kwargs)
            # Of a function, only the schema counts here; as a part of a plan, Spark would pickle and keep it.
            template = step.with_function(lambda _: _same)(self._template)
            _refuse_stateful(name, template)
            return StatefulDataFrame(self.backend, self.source, self.operators, template, (*self.steps, step))

        return record


def _same(batches: Any) -> Any:
    return batches


_LOOKS_AT_MANY_ROWS = {
    "Aggregate": f"an aggregate function over all rows would see one batch only: {_AGGREGATE}",
    "Window": f"a window function would see one batch only: {_REMEMBER}",
}
_JOINS_OF_STATIC_ROWS = {"RightOuter", "FullOuter"}


def _refuse_stateful(name: str, frame: DataFrame) -> None:
    """
    Refuse a step that is stateless by its name, and looks at more than one row of the stream.

    Raises:
        InvalidInputError: It would give another result batch by batch than on the whole stream.
    """
    for kind, join_type in stream_side_nodes(frame):
        if kind in _LOOKS_AT_MANY_ROWS:
            raise InvalidInputError(f"{name}: {_LOOKS_AT_MANY_ROWS[kind]}, or use foreachBatch")
        if kind == "Join" and join_type in _JOINS_OF_STATIC_ROWS:
            raise InvalidInputError(
                f"{name}: a right or full outer join would put the static rows without a partner out again in every "
                "batch: join 'inner', 'left', 'left_semi' or 'left_anti', or use foreachBatch"
            )


def grouping_columns(grouped: Any) -> tuple[str, ...]:
    """
    Return the names of the columns of a ``groupBy``.

    Raises:
        InvalidInputError: It groups by something else than columns.
    """
    names = []
    frame = grouped_frame(grouped)
    for text, is_column in grouping_expressions(grouped):
        name = _column_called(text, frame) if is_column else None
        if name is None:
            raise InvalidInputError(
                f"the state's key must be columns; {text!r} is none of {', '.join(frame.columns)}. "
                "Add it with withColumn first"
            )
        names.append(name)
    if not names:
        raise InvalidInputError("groupBy needs at least one column: state is kept per key")
    return tuple(names)


def _column_called(text: str, frame: DataFrame) -> str | None:
    """Return the column that Spark finds under a name, which by default is in any case."""
    if text in frame.columns or setting(frame.sparkSession, "spark.sql.caseSensitive", "false") == "true":
        return text if text in frame.columns else None
    return next((name for name in frame.columns if name.lower() == text.lower()), None)


def quoted(name: str) -> str:
    """Return a column's name as SQL."""
    return "`" + name.replace("`", "``") + "`"


def _has_normal_form(field: StructField) -> bool:
    """Say whether several values of a column are one key."""
    return isinstance(field.dataType, (FloatType, DoubleType))


def _normal_key(field: StructField) -> str:
    # Minus zero and zero are one key, and so are all not-a-numbers; Spark's own grouping does the same.
    name = quoted(field.name)
    if _has_normal_form(field):
        kind = field.dataType.simpleString()
        return f"if(isnan({name}), cast('NaN' as {kind}), {name} + cast(0 as {kind}))"
    return name
