"""
A query as a value: the API builds it, and the driver runs it.

It executes nothing, and knows neither the backend that made it nor the writer that starts the query.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.types import StructType

from backend_client.batch_time import TimeMode
from backend_client.settings import BackendSettings
from backend_client.spark.columnar_plan import ColumnarPlan
from backend_client.spark.event_time import EventTime, event_time_of
from dstl_service.wire import StateInfo

_MOVING = frozenset({"coalesce", "hint", "join", "repartition", "repartitionByRange"})
"""Steps after which a row may be in another partition, in each batch in another one."""


@dataclass(frozen=True, slots=True)
class Step:
    """
    A recorded call of a DataFrame method.

    With `has_subquery`, such as ``k in (select …)``, Spark makes a join of it.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    has_subquery: bool = False

    def __call__(self, frame: DataFrame) -> DataFrame:
        """Call the method on a frame."""
        result: DataFrame = getattr(frame, self.name)(*self.args, **self.kwargs)
        return result

    def with_function(self, change: Callable[[Any], Any]) -> Step:
        """Return the step with the user's function replaced; without a function, the step itself."""
        if self.name not in ("mapInArrow", "mapInPandas"):
            return self
        if self.args:
            return replace(self, args=(change(self.args[0]), *self.args[1:]))
        return replace(self, kwargs={**self.kwargs, "func": change(self.kwargs["func"])}) if self.kwargs else self


@dataclass(frozen=True, slots=True)
class InitialState:
    """The rows of an operator's initial state, and their grouping columns."""

    frame: DataFrame
    key_columns: tuple[str, ...]


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
    recreated_states: frozenset[str] = frozenset()
    """States that start empty in every batch, because ``init`` deletes them before it asks for them."""
    order: tuple[str, ...] = ()
    """Columns by which the rows of a key are sorted."""
    time_mode: TimeMode = TimeMode.NONE
    output_mode: str = "Update"
    is_named: bool = True
    """Whether the program names it; else it is called as its processor's class, with a number if that is taken."""

    @property
    def key_schema(self) -> StructType:
        """The grouping columns, in the order of ``groupBy``."""
        return StructType([self.input_schema[name] for name in self.key_columns])

    @property
    def uses_time(self) -> bool:
        """Whether something may become due in it as time passes: timers, ends of state, windows."""
        if isinstance(self.processor, ColumnarPlan):
            return self.processor.has_watermark
        return self.time_mode is not TimeMode.NONE

    @property
    def event_time(self) -> EventTime | None:
        """A row's event time; None unless the time mode is event time and the input has a watermark."""
        return event_time_of(self.input_schema, self.name) if self.time_mode is TimeMode.EVENT else None


@dataclass(frozen=True, slots=True)
class Query:
    """The input stream, the operators in order, and the stateless steps after the last one."""

    source: DataFrame
    operators: tuple[Operator, ...]
    steps: tuple[Step, ...]
    settings: BackendSettings

    @property
    def keeps_places(self) -> bool:
        """Whether the output of a partition of the last operator stays in one partition through the steps."""
        return not any(step.name in _MOVING or step.has_subquery for step in self.steps)

    @property
    def spark(self) -> SparkSession:
        """The session of the stream."""
        return self.source.sparkSession
