"""
Merges an operator's stored state variables with those that its processor declares now.

Each variable has a number, which is part of its table keys and never reused for another variable.
No I/O.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace

from backend_client.state.schema_change import key_difference, same_form, upgrade_of
from dstl_service.wire import StateInfo
from storage.errors import InvalidInputError

STATE_ID_MAX = 0xFF00
"""The largest number of a processor's variable; numbers above are reserved for the backend itself."""

DELETED = "deleted"
"""The kind of a deleted variable; its entry keeps its number reserved."""


def merge_states(
    operator: str, stored: Mapping[str, StateInfo], declared: Mapping[str, StateInfo]
) -> dict[str, StateInfo]:
    """
    Return declared variables with their stored numbers and earlier schemas; new ones get the next numbers.

    A variable that is no longer declared stays unchanged. A deleted one keeps only its number; if it is declared
    again later, it starts empty with a new number.

    Raises:
        InvalidInputError: A variable's change is not possible; names the field.
    """
    merged = dict(stored)
    for name, info in declared.items():
        known = stored.get(name)
        if info.kind == DELETED:
            if known is not None:
                merged[name] = replace(info, id=known.id, ttl_ms=_ttl_ms(known, info))
        elif known is None or known.kind == DELETED:
            merged[name] = replace(info, id=_next_id(operator, merged))
        elif known.kind != info.kind:
            raise InvalidInputError(
                f"state {name!r} of operator {operator!r} was stored as {known.kind} state, now it is {info.kind} "
                "state; use another state name"
            )
        else:
            earlier = _history(f"state {name!r} of operator {operator!r}", known, info.schema)
            merged[name] = replace(info, id=known.id, earlier=earlier, ttl_ms=_ttl_ms(known, info))
    return merged


def ids_to_delete(
    stored: Mapping[str, StateInfo], wanted: Mapping[str, StateInfo], recreated_states: Iterable[str] = ()
) -> tuple[int, ...]:
    """
    Return the numbers of the variables whose stored entries a batch deletes.

    Args:
        stored: The variables of the batch's base.
        wanted: The variables of its checkpoint.
        recreated_states: Names of those that start empty in every batch.
    """
    recreated = {wanted[name].id for name in recreated_states}
    kept = {info.id for info in wanted.values() if info.kind != DELETED} - recreated
    return tuple(sorted(info.id for info in stored.values() if info.kind != DELETED and info.id not in kept))


def map_schemas(schema: str) -> tuple[str, str]:
    """Return the schemas of the keys and of the values of a map state."""
    key, value = (json.dumps(field["type"]) for field in json.loads(schema)["fields"])
    return key, value


def _next_id(operator: str, states: Mapping[str, StateInfo]) -> int:
    number = max((state.id for state in states.values()), default=0) + 1
    if number > STATE_ID_MAX:
        raise InvalidInputError(
            f"operator {operator!r} has used up the {STATE_ID_MAX} numbers of state variables; use another job name"
        )
    return number


def _ttl_ms(known: StateInfo, declared: StateInfo) -> int | None:
    """Return the declared TTL in ms; 0 for none if stored values may still have an end."""
    return 0 if declared.ttl_ms is None and known.ttl_ms is not None else declared.ttl_ms


def _history(what: str, known: StateInfo, schema: str) -> list[str]:
    """Return a variable's earlier schemas under a new one, with its last one if the stored forms differ."""
    if known.kind == "map":
        # Entries are stored under the bytes of their keys, so these cannot change.
        before, now = (json.loads(map_schemas(text)[0]) for text in (known.schema, schema))
        difference = key_difference(before, now)
        if difference is not None:
            raise InvalidInputError(
                f"the user key of {what} {difference}; a map's keys cannot change: use another state name"
            )
    # Values of any of these may still be stored.
    for text in (known.schema, *reversed(known.earlier)):
        upgrade_of(text, schema, what)
    if same_form(json.loads(known.schema), json.loads(schema)):
        return known.earlier
    return [*known.earlier, known.schema]
