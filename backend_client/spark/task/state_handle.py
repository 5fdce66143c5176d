"""
The handle that a user's ``StatefulProcessor`` gets: PySpark's interface, on the driver and in tasks.

On the driver, `declare_states` runs ``init`` once to learn the state variables; in tasks, `TaskHandle` returns them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.types import StructField, StructType

from backend_client.batch_time import TimeMode
from backend_client.spark.shipping import copy_of
from backend_client.spark.task.rows import row_factory
from backend_client.state.codec import ValueCodec
from backend_client.state.declared_states import DELETED, map_schemas
from backend_client.state.expiry import ExpiringValue, Expiry, check_ttl
from backend_client.state.keyed_collections import ListVariable, MapVariable
from backend_client.state.keyed_state import KeyedState, ValueVariable
from backend_client.state.timers import Timers
from dstl_service.wire import StateInfo
from storage.errors import InvalidInputError

ParseSchema = Callable[[str], StructType]

_TIMERS_IN_INIT = "set timers in handleInputRows or handleExpiredTimer, which have a key"


class _Declared:
    """Stands for a state variable on the driver, where there is no key: ``init`` may keep it and its methods."""

    def __init__(self, name: str) -> None:
        self._name = name

    def exists(self, *_: Any) -> NoReturn:
        """Refuse: a value belongs to a key."""
        raise InvalidInputError(
            f"state {self._name!r} was used without a key: use it in handleInputRows, handleExpiredTimer or "
            "handleInitialState, not in init or close"
        )

    get = update = clear = put = appendValue = appendList = exists
    getValue = containsKey = updateValue = removeKey = iterator = keys = values = exists


class _DeclaringHandle:
    """Records the variables that ``init`` asks for."""

    def __init__(self, operator: str, parse: ParseSchema, time_mode: TimeMode) -> None:
        self._operator = operator
        self._parse = parse
        self._time_mode = time_mode
        self.states: dict[str, StateInfo] = {}
        self.recreated_states: set[str] = set()

    def getValueState(self, stateName: str, schema: StructType | str, ttlDurationMs: int | None = None) -> _Declared:
        """Record a value state."""
        return self._declare("value", stateName, self._struct(stateName, schema), ttlDurationMs)

    def getListState(self, stateName: str, schema: StructType | str, ttlDurationMs: int | None = None) -> _Declared:
        """Record a list state."""
        return self._declare("list", stateName, self._struct(stateName, schema), ttlDurationMs)

    def getMapState(
        self,
        stateName: str,
        userKeySchema: StructType | str,
        valueSchema: StructType | str,
        ttlDurationMs: int | None = None,
    ) -> _Declared:
        """Record a map state; its schema is a struct of key and value."""
        key, value = self._struct(stateName, userKeySchema), self._struct(stateName, valueSchema)
        pair = StructType([StructField("key", key, False), StructField("value", value, False)])
        return self._declare("map", stateName, pair, ttlDurationMs)

    def deleteIfExists(self, stateName: str) -> None:
        """Record that a state is to be deleted; one that is requested afterwards starts empty in every batch."""
        if stateName in self.states:
            raise InvalidInputError(
                f"init of operator {self._operator!r} gets state {stateName!r} and then deletes it; to remove the "
                "state, call deleteIfExists without getting it"
            )
        self.states[stateName] = StateInfo(0, DELETED, "")

    def registerTimer(self, *_: Any) -> NoReturn:
        """Refuse: a timer belongs to a key."""
        raise InvalidInputError(_TIMERS_IN_INIT)

    deleteTimer = listTimers = registerTimer

    def _struct(self, name: str, schema: StructType | str) -> StructType:
        struct = self._parse(schema) if isinstance(schema, str) else schema
        if not isinstance(struct, StructType) or not struct.fields:
            raise InvalidInputError(
                f"the schema of state {name!r} must be a StructType with fields, or text such as 'total double', not "
                f"{schema!r}"
            )
        return struct

    def _declare(self, kind: str, name: str, schema: StructType, ttl_ms: int | None) -> _Declared:
        if ttl_ms:
            ttl_ms = check_ttl(name, ttl_ms)
            if self._time_mode is not TimeMode.PROCESSING:
                raise InvalidInputError(
                    f"state {name!r} has a TTL, which counts processing time, but the timeMode is "
                    f"{self._time_mode.value!r}: use timeMode 'ProcessingTime', or leave ttlDurationMs out"
                )
        known = self.states.get(name)
        if known is not None and known.kind != DELETED:
            raise InvalidInputError(
                f"init of operator {self._operator!r} gets state {name!r} twice; give each state its own name"
            )
        if known is not None:
            self.recreated_states.add(name)
        ValueCodec(schema.json(), name)  # refuses unsupported types now rather than in a task
        self.states[name] = StateInfo(0, kind, schema.json(), ttl_ms=ttl_ms or None)
        return _Declared(name)


class TaskHandle:
    """Returns the state variables of one task."""

    def __init__(self, operator: str, states: dict[str, StateInfo], state: KeyedState) -> None:
        self._operator = operator
        self._states = states
        self._state = state
        self.timers: Timers | None = None
        """Set after ``init``, unless the time mode is None."""
        self._in_init = True

    def end_init(self) -> None:
        """From here on, refuse to return variables: two of one state would not see each other's writes."""
        self._in_init = False

    def getValueState(
        self, stateName: str, schema: StructType | str, ttlDurationMs: int | None = None
    ) -> ValueVariable:
        """Return a value state declared on the driver."""
        info = self._declared("value", stateName)
        codec, expiry = ValueCodec(info.schema, stateName, row_factory, info.earlier), self._expiry(info)
        if expiry is None:
            return ValueVariable(self._state, info.id, codec)
        return ExpiringValue(self._state, info.id, codec, expiry)

    def getListState(self, stateName: str, schema: StructType | str, ttlDurationMs: int | None = None) -> ListVariable:
        """Return a list state declared on the driver."""
        info = self._declared("list", stateName)
        codec = ValueCodec(info.schema, stateName, row_factory, info.earlier)
        return ListVariable(self._state, info.id, codec, self._expiry(info))

    def getMapState(
        self,
        stateName: str,
        userKeySchema: StructType | str,
        valueSchema: StructType | str,
        ttlDurationMs: int | None = None,
    ) -> MapVariable:
        """Return a map state declared on the driver."""
        info = self._declared("map", stateName)
        key, value = map_schemas(info.schema)
        return MapVariable(
            self._state,
            info.id,
            ValueCodec(key, f"{stateName}.key", row_factory),
            ValueCodec(value, f"{stateName}.value", row_factory, [map_schemas(text)[1] for text in info.earlier]),
            row_factory([field["name"] for field in json.loads(value)["fields"]]),
            self._expiry(info),
        )

    def registerTimer(self, expiryTimestampMs: int) -> None:
        """Set a timer for the current key."""
        self._timers().register(expiryTimestampMs)

    def deleteTimer(self, expiryTimestampMs: int) -> None:
        """Remove a timer of the current key; no error if it does not exist."""
        self._timers().delete(expiryTimestampMs)

    def listTimers(self) -> Iterator[int]:
        """Return the current key's timers in ms, in ascending order."""
        return self._timers().timestamps()

    def deleteIfExists(self, stateName: str) -> None:
        """Do nothing in ``init``: the driver recorded it, and the task has already deleted the state."""
        self._check_in_init("deletes", stateName, "clear() removes the current key's state")

    def _timers(self) -> Timers:
        if self.timers is None:
            raise InvalidInputError(
                f"operator {self._operator!r} has no timers here: {_TIMERS_IN_INIT}, and call transformWithState with "
                "timeMode 'ProcessingTime' or 'EventTime'"
            )
        return self.timers

    def _expiry(self, info: StateInfo) -> Expiry | None:
        return None if info.ttl_ms is None else Expiry(self._state, info.ttl_ms)

    def _check_in_init(self, act: str, name: str, remedy: str) -> None:
        if not self._in_init:
            raise InvalidInputError(f"operator {self._operator!r} {act} state {name!r} outside of init: {remedy}")

    def _declared(self, kind: str, name: str) -> StateInfo:
        self._check_in_init("gets", name, "get it once, in init, and keep it in an attribute of the processor")
        info = self._states.get(name)
        if info is None or info.kind != kind:
            raise InvalidInputError(
                f"{kind} state {name!r} of operator {self._operator!r} was not declared when init ran on the driver; "
                "init must get the same states every time"
            )
        return info


def declare_states(
    operator: str, processor: StatefulProcessor, parse: ParseSchema, time_mode: TimeMode = TimeMode.NONE
) -> tuple[dict[str, StateInfo], frozenset[str]]:
    """
    Run ``init`` on the driver, as Spark does; return the declared variables, and those that start empty in every batch.

    Deleted variables have the kind `DELETED`; `merge_states` merges all with the stored ones. As in Spark, ``init`` may
    create what cannot be sent to tasks: it runs on a copy, and tasks get the processor unchanged.

    Raises:
        InvalidInputError: ``init`` asks for an unsupported feature, or the processor cannot be sent to tasks.
    """
    handle = _DeclaringHandle(operator, parse, time_mode)
    declaring = copy_of(processor)
    declaring.init(handle)
    declaring.close()
    return handle.states, frozenset(handle.recreated_states)
