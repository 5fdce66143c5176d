"""
Constraints of a Delta table, which the library checks by another SQL than Spark's. No I/O.

Both SQLs agree on comparisons of columns with values, and these are taken. Of 7 / 2 they do not: a row would be
published that Spark's constraint forbids, or one would wait for ever that it allows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping

import pyarrow as pa
from deltalake import DeltaTable

_OF_TABLE = "delta.constraints."
_OF_COLUMN = "delta.invariants"
_WHOLE, _FRACTION, _TEXT = r"-?[0-9]{1,18}", r"-?[0-9]{1,15}\.[0-9]{1,15}", r"'[^'\\]*'"
_DATE = r"'[0-9]{4}-[0-9]{2}-[0-9]{2}'"
_VALUE = rf"(?:{_FRACTION}|{_WHOLE}|{_TEXT})"
_TERM = re.compile(
    r"(?P<name>`[^`]+`|[A-Za-z_][A-Za-z0-9_]*)\s*"
    rf"(?:(?:=|<>|!=|<=|>=|<(?!=|>)|>)\s*(?P<value>{_VALUE})(?![\w.'])"
    rf"|(?:\bNOT\s+)?\bIN\s*\((?P<values>\s*{_VALUE}\s*(?:,\s*{_VALUE}\s*)*)\)"
    rf"|(?:\bNOT\s+)?\bBETWEEN\s+(?P<least>{_VALUE})\s+AND\s+(?P<most>{_VALUE})(?![\w.'])"
    r"|\bIS\s+(?:NOT\s+)?NULL\b)",
    re.IGNORECASE,
)
_WORDS = re.compile(r"(?:true|and|or|not|[\s()])*", re.IGNORECASE)


def foreign_constraints(table: DeltaTable, columns: pa.Schema) -> list[str]:
    """Return the constraints of a table, as text, that the library may take for others than Spark does."""
    types = {column.name: column.type for column in columns}
    return [text for text in _constraints(table) if not _is_plain(text, types)]


def _constraints(table: DeltaTable) -> Iterator[str]:
    for name, text in table.metadata().configuration.items():
        if name.startswith(_OF_TABLE) and text is not None:
            yield text
    for column in table.schema().fields:
        if (found := column.metadata.get(_OF_COLUMN)) is not None:
            yield str(json.loads(str(found))["expression"]["expression"])


def _is_plain(text: str, types: Mapping[str, pa.DataType]) -> bool:
    """Return whether an expression consists of comparisons of columns with values of their types."""

    def checked(term: re.Match[str]) -> str:
        name = term["name"].strip("`")
        values = [term["value"], term["least"], term["most"], *re.findall(_VALUE, term["values"] or "")]
        is_plain = name in types and all(_is_of(value, types[name]) for value in values if value is not None)
        return " true " if is_plain else term[0]

    return _WORDS.fullmatch(_TERM.sub(checked, text)) is not None


def _is_of(value: str, kind: pa.DataType) -> bool:
    """Return whether a value needs no cast, in which the two differ: as of texts to moments, or to numbers."""
    if pa.types.is_string(kind):
        return re.fullmatch(_TEXT, value) is not None
    if pa.types.is_date(kind):
        return re.fullmatch(_DATE, value) is not None
    is_whole = re.fullmatch(_WHOLE, value) is not None
    if pa.types.is_floating(kind):
        return is_whole or re.fullmatch(_FRACTION, value) is not None
    return is_whole and bool(pa.types.is_integer(kind) or pa.types.is_decimal(kind))
