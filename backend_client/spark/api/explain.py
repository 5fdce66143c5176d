"""A text description of a stateful result, in the manner of Spark's ``explain``. No I/O."""

from __future__ import annotations

import json

from pyspark.sql.types import StructType

from backend_client.spark.query import Operator, Query
from storage.key_groups import check_parallelism

DEFAULT_MAX_PARALLELISM = 128


def describe(query: Query) -> str:
    """Return a text that lists a query's operators, last first, and where their state is kept."""
    settings = query.settings
    groups = settings.max_parallelism
    default = settings.parallelism
    if default is None:
        default = min(query.spark.sparkContext.defaultParallelism, groups or DEFAULT_MAX_PARALLELISM)
    lines = [
        "== Stateful Operators ==",
        f"Job {settings.job} in {settings.storage}, "
        + (f"{groups} key groups" if groups else f"key groups as stored ({DEFAULT_MAX_PARALLELISM} if new)"),
    ]
    indent, steps = "", len(query.steps)
    for number in range(len(query.operators), 0, -1):
        if steps:
            lines.append(f"{indent}+- {steps} stateless {'step' if steps == 1 else 'steps'}")
            indent += "   "
        operator = query.operators[number - 1]
        lines.append(f"{indent}+- StatefulOperator {operator.name} ({number})")
        indent += "   "
        lines += [f"{indent}{line}" for line in _of_operator(operator, default, groups or DEFAULT_MAX_PARALLELISM)]
        steps = len(operator.steps)
    return "\n".join([*lines, f"{indent}+- Input {_columns(query.source.schema)}", ""])


def _of_operator(operator: Operator, default: int, key_groups: int) -> list[str]:
    processor = type(operator.processor)
    parallelism = operator.parallelism or default
    check_parallelism(parallelism, key_groups)
    states = [
        f"State {name} ({info.kind}): {StructType.fromJson(json.loads(info.schema)).simpleString()}"
        for name, info in operator.states.items()
    ]
    return [
        f"Processor: {processor.__module__}.{processor.__qualname__}, {'pandas' if operator.pandas else 'Row'} API",
        f"Key: {_columns(operator.key_schema)}",
        f"Parallelism: {parallelism} partitions of about {key_groups // parallelism} key groups",
        *(states or ["State: none"]),
        f"Output: {_columns(operator.output_schema)}",
    ]


def _columns(schema: StructType) -> str:
    return f"[{', '.join(f'{field.name}: {field.dataType.simpleString()}' for field in schema.fields)}]"
