"""
The plans that are compared with Spark's own operator, and their queries.

Queries are expensive, so plans of one API and time mode share one, each with its own keys. Programs know only Spark's
API, and get the number of their run if they change between two runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from pyspark.sql import DataFrame, GroupedData
from pyspark.sql import functions as F

from tests.e2e.differential import (
    frame_processors,
    programs,
    restart_processors,
    row_processors,
    time_processors,
)
from tests.e2e.differential.history import CLOCK
from tests.e2e.differential.reporting import OUTPUT, Together

# Rows of keys with input in the first batch, in a later one, and never; two rows of one key, and a null key.
_INITIAL = [("a", 10, [1]), ("a", 11, None), ("c", 12, [2, 3]), (None, 13, []), (CLOCK, 14, [4]), ("never", 15, [5])]
_ENCODING = "spark.sql.streaming.stateStore.encodingFormat"


@dataclass(frozen=True, slots=True)
class Query:
    """A program with the plans that it has in it; `build` makes it from the input and the number of the run."""

    name: str
    plans: Mapping[str, str]
    """Name and description."""
    build: Callable[[DataFrame, int], Any]
    closing: int = 0
    """
    With timers, the number of files at the end that advance time past all of them.

    One is enough: in event time, all timers that it makes due fire after its rows, as on Spark, and nothing follows.
    """
    as_a_whole: bool = False
    """
    Whether outputs are compared as a whole, to the last row, and not batch by batch.

    With timers Spark runs a batch without data whenever the watermark moved, and endlessly with processing time; here,
    its event-time output is part of the previous batch.
    """
    by_clock: bool = False
    """Whether timers use processing time."""
    runs: tuple[int, int] = (2, 2)
    """The minimum and the maximum number of runs."""
    spark_settings: Mapping[str, str] = field(default_factory=dict)
    shared: Shared | None = None
    """The operator, if plans share one."""


@dataclass(frozen=True, slots=True)
class Shared:
    """
    Processors that share an operator.

    `delays` are those of the inputs' watermarks; rows are divided among the inputs. The plans `begun` have initial
    state.
    """

    processors: Mapping[str, Callable[[int], Any]]
    mode: str = "Update"
    time_mode: str = "None"
    delays: tuple[str, ...] = ()
    begun: tuple[str, ...] = ()
    pandas: bool = False

    def build(self, stream: DataFrame, run: int) -> Any:
        """Build the program of a run."""
        inputs = [
            stream.where(f"k = '{CLOCK}' or op % {len(self.delays)} = {number}").withWatermark("t", delay)
            for number, delay in enumerate(self.delays)
        ]
        for other in inputs:
            stream = other if other is inputs[0] else stream.union(other)
        rows = stream.select("*", F.expr("unix_millis(t) as ms"), F.explode(F.lit([*self.processors])).alias("plan"))
        grouped = rows.groupBy("plan", "k")
        transform = grouped.transformWithStateInPandas if self.pandas else grouped.transformWithState
        processor = Together({plan: make(run) for plan, make in self.processors.items()})
        return transform(processor, OUTPUT, self.mode, self.time_mode, self._initial(stream))

    def _initial(self, stream: DataFrame) -> GroupedData | None:
        rows = [(plan, *row) for plan in self.begun for row in _INITIAL]
        if not rows:
            return None
        frame = stream.sparkSession.createDataFrame(rows, "plan string, name string, c long, parts array<int>")
        return frame.groupBy("plan", "name")


def _shared(name: str, shared: Shared, **more: Any) -> Query:
    return Query(
        name,
        {plan: _first_line(make) for plan, make in shared.processors.items()},
        shared.build,
        closing=int(shared.time_mode != "None"),
        as_a_whole=shared.time_mode != "None",
        by_clock=shared.time_mode == "ProcessingTime",
        shared=shared,
        **more,
    )


def _alike(processors: Mapping[str, Callable[[], Any]]) -> dict[str, Callable[[int], Any]]:
    """Return processors that are the same in every run."""

    def make(processor: Callable[[], Any], run: int) -> Any:
        return processor()

    return {plan: partial(make, processor) for plan, processor in processors.items()}


def _first_line(documented: Any) -> str:
    documented = documented.args[0] if isinstance(documented, partial) else documented
    return str(documented.__doc__).strip().splitlines()[0]


QUERIES = (
    _shared("rows", Shared(_alike(row_processors.PROCESSORS), begun=("initial-state",))),
    _shared(
        "event-time",
        Shared(_alike(time_processors.EVENT_TIME), "Append", "EventTime", delays=("7 seconds", "2 seconds")),
    ),
    _shared("processing-time", Shared(_alike(time_processors.PROCESSING_TIME), time_mode="ProcessingTime")),
    _shared(
        "pandas",
        Shared(
            _alike(frame_processors.PROCESSORS),
            time_mode="EventTime",
            delays=("5 seconds",),
            begun=("pandas-initial-state",),
            pandas=True,
        ),
    ),
    _shared(
        "restarts",
        Shared(restart_processors.PROCESSORS),
        runs=(2, restart_processors.RUNS),
        spark_settings={_ENCODING: "avro"},
    ),
    Query("chain", {"chain": _first_line(programs.chain)}, programs.chain, closing=1, as_a_whole=True),
    Query(
        "after-window",
        {"after-window": _first_line(programs.after_window)},
        programs.after_window,
        closing=1,
        as_a_whole=True,
    ),
    Query(
        "after-join",
        {"after-join": _first_line(programs.after_join)},
        programs.after_join,
        closing=1,
        as_a_whole=True,
    ),
    Query(
        "stateless-steps",
        {
            "stateless-steps": _first_line(programs.stateless_steps),
            "float-keys": "Keys of several columns, with nulls, infinities and NaN.",
        },
        programs.stateless_steps,
    ),
    Query("types", {"types": _first_line(programs.types)}, programs.types),
)
PLANS = {plan: query for query in QUERIES for plan in query.plans}


def alone(query: Query, plan: str) -> Query:
    """Return a query with only one of its plans, or unchanged if its plans cannot be separated."""
    if query.shared is None:
        return replace(query, name=f"{plan}-alone")
    processors = {plan: query.shared.processors[plan]}
    begun = tuple(name for name in query.shared.begun if name == plan)
    own = replace(query.shared, processors=processors, begun=begun)
    return replace(query, name=f"{plan}-alone", plans={plan: query.plans[plan]}, build=own.build, shared=own)
