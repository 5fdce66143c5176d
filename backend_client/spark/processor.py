"""
What a user's ``StatefulProcessor`` gets from this backend: PySpark's handle, on the driver and in tasks.

On the driver, `declare_states` runs ``init`` once to learn the state variables; in tasks `TaskHandle` gives them out.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NoReturn

from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.types import StructType

from backend_client.codec import ValueCodec
from backend_client.keyed_state import KeyedState, ValueVariable
from backend_client.spark.rows import row_factory
from dstl_service.wire import StateInfo
from storage.errors import InvalidInputError

ParseSchema = Callable[[str], StructType]


class _Handle:
    """Refuses what this backend does not serve, with the same words on the driver and in tasks."""

    def getListState(self, stateName: str, *_: Any, **__: Any) -> NoReturn:
        """Refuse: only value state is served so far."""
        raise _unsupported(f"list state {stateName!r}", "keep the list in an array field of a value state")

    def getMapState(self, stateName: str, *_: Any, **__: Any) -> NoReturn:
        """Refuse: only value state is served so far."""
        raise _unsupported(f"map state {stateName!r}", "keep the map in a map field of a value state")

    def registerTimer(self, *_: Any) -> NoReturn:
        """Refuse: timers are not served so far."""
        raise _unsupported("a timer", "use timeMode 'None' without timers")

    deleteTimer = listTimers = registerTimer

    def deleteIfExists(self, stateName: str) -> NoReturn:
        """Refuse: whole variables cannot be removed so far."""
        raise _unsupported(f"deleting state {stateName!r}", "clear its values key by key")


class _DeclaringHandle(_Handle):
    """Records the variables that ``init`` asks for; their values cannot be used."""

    def __init__(self, operator: str, parse: ParseSchema) -> None:
        self._operator = operator
        self._parse = parse
        self.schemas: dict[str, str] = {}

    def getValueState(
        self,
        stateName: str,
        schema: StructType | str,
        ttlDurationMs: int | None = None,
    ) -> None:
        """Record a value state."""
        if ttlDurationMs is not None:
            raise _unsupported(f"a TTL on state {stateName!r}", "leave ttlDurationMs out")
        if stateName in self.schemas:
            raise InvalidInputError(f"operator {self._operator!r} asks for state {stateName!r} twice")
        struct = self._parse(schema) if isinstance(schema, str) else schema
        ValueCodec(struct.json(), stateName)  # refuses what state cannot hold, now rather than in a task
        self.schemas[stateName] = struct.json()


class TaskHandle(_Handle):
    """Gives out the variables of one task."""

    def __init__(self, operator: str, states: dict[str, StateInfo], state: KeyedState) -> None:
        self._operator = operator
        self._states = states
        self._state = state

    def getValueState(
        self,
        stateName: str,
        schema: StructType | str,
        ttlDurationMs: int | None = None,
    ) -> ValueVariable:
        """Return a value state that was declared on the driver."""
        info = self._states.get(stateName)
        if info is None:
            raise InvalidInputError(
                f"state {stateName!r} of operator {self._operator!r} was not asked for when init ran on the driver; "
                "init must ask for the same states every time"
            )
        return ValueVariable(self._state, info.id, ValueCodec(info.schema, stateName, row_factory))


def declare_states(operator: str, processor: StatefulProcessor, parse: ParseSchema) -> dict[str, StateInfo]:
    """
    Run ``init`` on the driver, as Spark does, and return the variables that it asks for, numbered from 1.

    Raises:
        InvalidInputError: It asks for something that this backend does not serve.
    """
    handle = _DeclaringHandle(operator, parse)
    processor.init(handle)  # type: ignore[arg-type]
    processor.close()
    return {name: StateInfo(number, "value", schema) for number, (name, schema) in enumerate(handle.schemas.items(), 1)}


def merge_states(operator: str, stored: dict[str, StateInfo], declared: dict[str, StateInfo]) -> dict[str, StateInfo]:
    """
    Give declared variables the numbers that they have in stored state; new ones come behind.

    Raises:
        InvalidInputError: A variable's schema differs from the stored one; names the first field that does.
    """
    merged = dict(stored)
    for name, info in declared.items():
        known = stored.get(name)
        if known is None:
            merged[name] = StateInfo(max((s.id for s in merged.values()), default=0) + 1, info.kind, info.schema)
        elif known.schema != info.schema or known.kind != info.kind:
            raise InvalidInputError(
                f"state {name!r} of operator {operator!r} {schema_difference(known.schema, info.schema)}; "
                "go back to the stored schema, or use another state name"
            )
    return merged


def schema_difference(stored: str, given: str) -> str:
    """Return in words where two struct schemas (Spark's JSON) part."""
    old, new = StructType.fromJson(json.loads(stored)), StructType.fromJson(json.loads(given))
    for position, field in enumerate(old.fields):
        if position >= len(new.fields):
            return f"has lost its field {field.name!r}"
        other = new.fields[position]
        if field.name != other.name:
            return f"was stored with field {field.name!r} where {other.name!r} is now"
        if field.dataType != other.dataType or field.nullable != other.nullable:
            return (
                f"was stored with field {field.name!r} as {field.dataType.simpleString()}"
                f"{'' if field.nullable else ' not null'}, now it is {other.dataType.simpleString()}"
                f"{'' if other.nullable else ' not null'}"
            )
    if len(new.fields) > len(old.fields):
        return f"has the new field {new.fields[len(old.fields)].name!r}"
    return "differs in its metadata"


def _unsupported(what: str, instead: str) -> InvalidInputError:
    return InvalidInputError(f"{what} is not served by this backend yet; {instead}")
