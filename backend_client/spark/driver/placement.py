"""Sends an operator's rows to the partitions of their keys, sorted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import DoubleType, FloatType, StructField

from backend_client.key_group_sql import (
    key_group_expression,
    order_expression,
    owner_expression,
    partition_expression,
)
from backend_client.spark.columns import quoted
from backend_client.spark.combining import PANE_COLUMN, ROWS_PER_GROUP_APART, Combining
from backend_client.spark.output.apart import speculates
from backend_client.spark.own_session import own_session
from backend_client.spark.places.hosts import PARTITION_COLUMN, Hosts, numbers_apart
from backend_client.spark.private.frame_maker import FrameMaker, Steps
from backend_client.spark.private.session import setting
from backend_client.spark.query import Operator

Pin = Callable[[DataFrame, int], DataFrame]
"""Pins rows that are partitioned by `PARTITION_COLUMN` to executors, given the number of partitions."""

ORDER_COLUMN = "__dstl_order"
_KEY_COLUMN = "__dstl_key_"
_COLUMN = "__dstl_column_"
_ALL_KEYS = "spark.sql.requireAllClusterKeysForDistribution"
"""With this setting, Spark moves rows again unless they are partitioned by all columns by which it groups."""
_RETAINS_KEYS = "spark.sql.retainGroupColumns"


def key_places(operator: Operator) -> tuple[int | None, ...]:
    """Return each key column's position among the input's columns; None for one that `place` adds in normal form."""
    schema = operator.input_schema
    return tuple(None if _has_normal_form(schema[name]) else schema.names.index(name) for name in operator.key_columns)


def slots_placer(spark: SparkSession, hosts: Hosts | None) -> Callable[[int], Sequence[DataFrame]]:
    """
    Return a function of a number of slots that returns frames of their numbers, each in a partition of its own.

    It is one frame, and its slots are one Spark job. Where Spark speculates, each slot has a frame of its own.

    Args:
        spark: The query's session.
        hosts: Where partitions have places; None where they are not pinned to executors.
    """
    is_apart = speculates(spark)
    if hosts is not None:
        return hosts.anchors_apart if is_apart else lambda slots: [hosts.anchor(slots)]
    numbers = partial(numbers_apart, own_session(spark))
    return lambda slots: [numbers(at, at + 1) for at in range(slots)] if is_apart else [numbers(0, slots)]


def place(
    operator: Operator,
    frame: DataFrame,
    parallelism: int,
    max_parallelism: int,
    pin: Pin | None,
    late_until_ms: int | None = None,
) -> Steps:
    """
    Return the rows in their partitions, sorted by key group and a hash of the key.

    Columns: the order number by which rows are sorted, the key columns in normal form (`key_places`), then the columns
    of `frame`; tasks know them by position. Spark sorts, and spills what does not fit in memory. A late row has the
    complement of its order number, which is negative, for `LateRowFilter`. A key's rows are in the operator's `order`;
    keys with the same order number are interleaved, for `KeySeparator`.

    Args:
        operator: The operator that reads the rows.
        frame: The rows.
        parallelism: Number of partitions.
        max_parallelism: Number of key groups.
        pin: Pins partitions to executors; None to leave them unpinned.
        late_until_ms: Rows with an event time up to this moment, inclusive, are late; None if no row is.
    """
    fields = [operator.input_schema[name] for name in operator.key_columns]
    order = order_expression([_normal_key(field) for field in fields], max_parallelism)
    added = {f"{_KEY_COLUMN}{at}": _normal_key(field) for at, field in enumerate(fields) if _has_normal_form(field)}
    time = operator.event_time
    if late_until_ms is not None and time is not None:
        order = f"if({time.until(late_until_ms)}, ~({order}), {order})"
    frames = FrameMaker.of(frame)
    keyed = frames.steps(frame).select_expr(
        f"{order} as {ORDER_COLUMN}",
        *(f"{expression} as {name}" for name, expression in added.items()),
        "*",
    )
    partition = partition_expression(ORDER_COLUMN, parallelism, max_parallelism)
    if pin is None:
        placed = keyed.repartition_by_id(parallelism, partition)
    else:
        moved = keyed.select_expr("*", f"{partition} as {PARTITION_COLUMN}")
        moved = moved.repartition_by_id(parallelism, PARTITION_COLUMN)
        placed = frames.steps(pin(moved.frame(), parallelism).drop(PARTITION_COLUMN))
    placed = placed.sort_within_partitions(ORDER_COLUMN, *operator.order)
    names = _names(operator)
    # New names cost a copy of each row.
    return placed if names == (plain := placed_names(operator)) else frames.steps(placed.frame().toDF(*plain))


def finds_combined_in_place(spark: SparkSession) -> bool:
    """
    Return whether Spark aggregates rows where `place_combined` has moved them, and keeps the keys beside the results.

    It does both unless told otherwise.
    """
    kept, moved = setting(spark, _RETAINS_KEYS, "true"), setting(spark, _ALL_KEYS, "false")
    return kept.lower() == "true" and moved.lower() == "false"


def place_combined(
    operator: Operator,
    combining: Combining,
    frame: DataFrame,
    parallelism: int,
    max_parallelism: int,
    pin: Pin | None,
    rows_per_group: float = 0.0,
) -> Steps:
    """
    Return the rows in their partitions, combined there, and sorted as by `place`.

    Columns: the order number, all key columns in normal form, then `combining.rows`. Spark aggregates where the rows
    are: the partition's number is among the columns by which it groups, so it moves nothing again. Where that leaves
    much less to move, each source partition is aggregated before.

    Args:
        operator: The operator that reads the rows.
        combining: How its rows are combined.
        frame: The rows.
        parallelism: Number of partitions.
        max_parallelism: Number of key groups.
        pin: Pins partitions to executors; None to leave them unpinned.
        rows_per_group: How many rows are expected for each that is left.
    """
    fields = [operator.input_schema[name] for name in operator.key_columns]
    keys = [f"{_KEY_COLUMN}{at}" for at in range(len(fields))]
    groups = keys if combining.pane is None else [*keys, PANE_COLUMN]
    expressions = [f"{_normal_key(field)} as {name}" for field, name in zip(fields, keys, strict=True)]
    if combining.pane is not None:
        expressions.append(f"{combining.pane} as {PANE_COLUMN}")
    frames, aggregates, rows = FrameMaker.of(frame), combining.aggregates, None
    if rows_per_group >= ROWS_PER_GROUP_APART * parallelism:
        rows = frames.aggregate_apart(frame, expressions, groups, aggregates)
    if rows is None:
        steps = frames.steps(frame).select_expr(*expressions, "*")
    else:
        steps, aggregates = frames.steps(rows), combining.merges
    partition = owner_expression(key_group_expression(keys, max_parallelism), parallelism, max_parallelism)
    steps = steps.select_expr("*", f"{partition} as {PARTITION_COLUMN}")
    placed = steps.repartition_by_id(parallelism, PARTITION_COLUMN).frame()
    if pin is not None:
        placed = pin(placed, parallelism)
    combined = frames.aggregate(placed, [PARTITION_COLUMN, *groups], aggregates)
    order = order_expression(keys, max_parallelism)
    _, *names = combined_names(operator, combining)
    named = frames.steps(combined).select_expr(f"{order} as {ORDER_COLUMN}", *names)
    return named.sort_within_partitions(ORDER_COLUMN)


def combined_names(operator: Operator, combining: Combining) -> tuple[str, ...]:
    """Return the names of the columns of `place_combined`."""
    keys = (f"{_KEY_COLUMN}{at}" for at in range(len(operator.key_columns)))
    return (ORDER_COLUMN, *keys, *combining.rows.names)


def placed_names(operator: Operator) -> tuple[str, ...]:
    """Return the names of the columns of `place`: as ``mapInArrow`` finds them, which looks names up without quotes."""
    names = _names(operator)
    if not any("." in name or "`" in name for name in names):
        return names
    return tuple(f"{_COLUMN}{position}" for position in range(len(names)))


def _names(operator: Operator) -> tuple[str, ...]:
    schema, keys = operator.input_schema, enumerate(operator.key_columns)
    return (ORDER_COLUMN, *(f"{_KEY_COLUMN}{at}" for at, key in keys if _has_normal_form(schema[key])), *schema.names)


def _has_normal_form(field: StructField) -> bool:
    """Return whether different values of a column can be one key."""
    return isinstance(field.dataType, (FloatType, DoubleType))


def _normal_key(field: StructField) -> str:
    # Minus zero and zero are one key, and so are all NaNs, as in Spark's own grouping.
    name = quoted(field.name)
    if _has_normal_form(field):
        kind = field.dataType.simpleString()
        return f"if(isnan({name}), cast('NaN' as {kind}), {name} + cast(0 as {kind}))"
    return name
