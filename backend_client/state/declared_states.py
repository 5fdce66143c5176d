"""
What becomes of an operator's stored state variables when its processor asks for others than last time.

Each variable has a number, which is part of its table keys and is never given to another variable.
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
"""The largest number of a processor's variable; the last ones are kept for what the backend itself stores."""

DELETED = "deleted"
"""The kind of a variable that was deleted: it keeps its number from being given to another one."""


def merge_states(
    operator: str, stored: Mapping[str, StateInfo], declared: Mapping[str, StateInfo]
) -> dict[str, StateInfo]:
    """
    Give declared variables the numbers and the earlier schemas that they have in stored state; new ones come behind.

    A variable that is no longer asked for stays as it is. Of a deleted one only its number is kept; if it is asked for
    later, it begins anew with another number.

    Raises:
        InvalidInputError: A variable cannot become what is declared; names the field.
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
    Return the numbers of the variables of which a batch deletes all that is stored.

    Args:
        stored: What the batch's base has.
        wanted: What its checkpoint is to have.
        recreated_states: Names of those that begin anew with every batch.
    """
    anew = {wanted[name].id for name in recreated_states}
    kept = {info.id for info in wanted.values() if info.kind != DELETED} - anew
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
    """Return the TTL that is declared now; 0 if there is none, but stored values may have an end."""
    return 0 if declared.ttl_ms is None and known.ttl_ms is not None else declared.ttl_ms


def _history(what: str, known: StateInfo, schema: str) -> list[str]:
    """Return the earlier schemas of a known variable under a new one: its last too, if values differ by it."""
    if known.kind == "map":
        # Entries lie under the bytes of their keys, so these never change.
        before, now = (json.loads(map_schemas(text)[0]) for text in (known.schema, schema))
        difference = key_difference(before, now)
        if difference is not None:
            raise InvalidInputError(
                f"the user key of {what} {difference}; the keys of a map never change: use another state name"
            )
    # A value of any of them may still be stored.
    for text in (known.schema, *reversed(known.earlier)):
        upgrade_of(text, schema, what)
    if same_form(json.loads(known.schema), json.loads(schema)):
        return known.earlier
    return [*known.earlier, known.schema]
