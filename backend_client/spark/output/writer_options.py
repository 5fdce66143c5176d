"""The names of a writer's options: which are the query's own, and which cannot be meant."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches

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
