"""
Markers as application transactions of a Delta table: numbers under names, of which the newest of each name is kept.

A table keeps every name for ever, so none of them says which checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from deltalake import DeltaTable

from backend_client.sinks.protocol import MARKER_CHARS_MAX, Marker, Slot
from storage.errors import CorruptDataError, InvalidInputError, UnavailableError

_RETENTION = "delta.setTransactionRetentionDuration"
_END = b"\0"
_NUMBER_BYTES = 8


def check_retention(table: DeltaTable, path: str) -> None:
    """Raise `UnavailableError` if the table forgets transactions: output would be published again."""
    value = table.metadata().configuration.get(_RETENTION)
    if value is not None:
        raise UnavailableError(
            f"table {path} has {_RETENTION} = {value}, so it forgets what was published to it: unset this property"
        )


def _name(slot: Slot) -> str:
    return f"dstl/{slot.sink}/{slot.job_uid}/{slot.number}"


def transactions(slot: Slot, marker: Marker) -> Iterator[tuple[str, int]]:
    """
    Yield names and numbers that say all of a marker.

    The number under the slot's name is the checkpoint's id. The marker's text, without job and slot, is in the numbers
    after it, eight bytes each, filled up with at least one zero byte.
    """
    yield _name(slot), marker.checkpoint.id
    data = marker.to_text().split(" ", 2)[2].encode("ascii") + _END
    data += _END * (-len(data) % _NUMBER_BYTES)
    for index in range(len(data) // _NUMBER_BYTES):
        part = data[index * _NUMBER_BYTES : (index + 1) * _NUMBER_BYTES]
        yield f"{_name(slot)}/{index}", int.from_bytes(part, "big")


def stored_marker(table: DeltaTable, slot: Slot) -> Marker | None:
    """Return the marker in a version of the table."""
    name = _name(slot)
    checkpoint_id = table.transaction_version(name)
    if checkpoint_id is None:
        return None
    data = b""
    with suppress(InvalidInputError, OverflowError, UnicodeDecodeError):
        while not data.endswith(_END) and len(data) <= MARKER_CHARS_MAX:
            data += _part(table, f"{name}/{len(data) // _NUMBER_BYTES}")
        marker = Marker.parse(f"{slot.job_uid} {slot.number} {data.rstrip(_END).decode('ascii')}")
        if marker.checkpoint.id == checkpoint_id:
            return marker
    raise CorruptDataError(
        f"transactions {name} of table {table.table_uri} are not those of one commit; only the sink may write them",
        object_key=table.table_uri,
    )


def is_of_slot(actions: Iterable[Mapping[str, Any]], slot: Slot) -> bool:
    """Return whether a commit with these actions has a slot's marker."""
    found = [action.get("txn") for action in actions]
    return any(isinstance(each, Mapping) and each.get("appId") == _name(slot) for each in found)


def _part(table: DeltaTable, name: str) -> bytes:
    number = table.transaction_version(name)
    if number is None:
        raise InvalidInputError(f"there is no transaction {name}")
    return number.to_bytes(_NUMBER_BYTES, "big")
