"""A writer's options: which are the query's own, and which cannot be meant."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from backend_client.sources.kafka_positions import OPTION
from backend_client.spark.output.source_group import is_group_option
from storage.errors import InvalidInputError

_OWN = {name.lower(): name for name in ("checkpointLocation", "guarantee", "abandonOutput")}
_ALIKE = 0.8
"""How alike an unknown name and one of the query's are, from 0 to 1, if the former is taken for a slip."""


def is_own(name: str) -> bool:
    """Return whether an option is the query's, not that of its sink."""
    return name.lower() in _OWN or is_group_option(name.lower())


def check_names(options: Iterable[str]) -> None:
    """Raise `InvalidInputError` if an option looks like a misspelt one of the query, which would have no effect."""
    names = {**_OWN, OPTION: "consumerGroup"}
    for name in options:
        meant = [] if is_own(name) else get_close_matches(name.lower(), names, 1, _ALIKE)
        if meant:
            raise InvalidInputError(f"there is no option {name!r}; it looks like {names[meant[0]]!r}")


def check_beside_sink(options: Iterable[str], partition_by: Sequence[str]) -> None:
    """Raise `InvalidInputError` if a query with a ``sink(…)`` has what only Spark's sinks heed."""
    if partition_by:
        raise InvalidInputError("a query with sink(…) has no partitionBy; DeltaSink(…, partition_by=…) partitions")
    if unknown := sorted(name for name in options if not is_own(name)):
        raise InvalidInputError(
            f"a query with sink(…) has no option {', '.join(unknown)}: options of the system are arguments of the "
            "sink, and slots, backlog_checkpoints, backlog_bytes and patience_s those of sink(…)"
        )


def check_beside_function(source: str | None, path: str | None, partition_by: Sequence[str]) -> None:
    """Raise `InvalidInputError` if a query whose batches a function writes has an output of Spark's besides."""
    for name, value in (("format", source), ("a path", path), ("partitionBy", partition_by)):
        if value:
            raise InvalidInputError(
                f"the query has a function, and {name} besides, which would have no effect: the function alone writes "
                "its batches. Leave one of them out, or write with batch.write in foreachBatch(…)"
            )


def check_beside_table(*, has_sink: bool, has_function: bool) -> None:
    """Raise `InvalidInputError` if a query that writes to a table has another output."""
    if has_sink or has_function:
        other = "sink(…)" if has_sink else "function"
        raise InvalidInputError(
            f"the query has a {other} and another output, toTable(…): it writes to one of them, with start() to the "
            f"{other}; use a query for each"
        )


def path_option(path: str | None, option: Any) -> dict[str, str]:
    """Return the path given to `start` as an option; `InvalidInputError` if there is such an option already."""
    if path is not None and option is not None:
        raise InvalidInputError("the path is given twice, as an option and to start(…); give it once")
    return {} if path is None else {"path": path}


def check_trigger(trigger: Mapping[str, Any]) -> None:
    """Raise `InvalidInputError` for a trigger without batches."""
    for name in ("continuous", "realTime"):
        if trigger.get(name) is not None:
            raise InvalidInputError(
                f"trigger({name}=…) is not supported, because state is checkpointed per batch; use "
                "trigger(processingTime='0 seconds')"
            )


def location_of(option: Any, root: str | None, query_name: str | None) -> str:
    """
    Return the folder of a query's Spark checkpoint.

    Args:
        option: The option ``checkpointLocation``.
        root: Spark's setting of this name.
        query_name: The query's name, below `root`.

    Raises:
        InvalidInputError: There is none.
    """
    if option:
        return str(option)
    if root and query_name:
        return f"{root.rstrip('/')}/{query_name}"
    raise InvalidInputError(
        "the option checkpointLocation is required: Spark keeps the stream's offsets there, and the state belongs "
        "to them; call option('checkpointLocation', …) on the writer"
    )
