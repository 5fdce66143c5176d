"""
Constraints of a Delta table, which the library checks by another SQL than Spark's. No I/O.

Both SQLs agree on comparisons of columns with values, and these are taken. Of 7 / 2 they do not: a row would be
published that Spark's constraint forbids, or one would wait for ever that it allows. Of lengths it knows nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from storage.errors import UnavailableError
from storage.stored_json import parse_json

_CHARS_MAX = 100_000
"""Each publish looks at them."""
_OF_TABLE = "delta.constraints."
_OF_COLUMN = "delta.invariants"
_TEXT_TYPE = "__CHAR_VARCHAR_TYPE_STRING"
"""Where Spark notes in a column's metadata that it is no plain string."""
_LIMITED = re.compile(r"(?:var)?char\((?P<length>[0-9]{1,9})\)")
_WHOLE, _FRACTION, _TEXT = r"-?[0-9]{1,18}", r"-?[0-9]{1,15}\.[0-9]{1,15}", r"'[^'\\]*'"
_DATE = r"'[0-9]{4}-[0-9]{2}-[0-9]{2}'"
_VALUE = rf"(?:{_FRACTION}|{_WHOLE}|{_TEXT})"
# A name begins and ends at most once per word, or the search would take a time with the square of a word's length.
_TERM = re.compile(
    r"(?P<name>`[^`]+`|(?<![A-Za-z0-9_])[A-Za-z_][A-Za-z0-9_]*+)\s*+"
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
    return [text for text in texts_of_constraints(table) if not _is_plain(text, types)]


def check_lengths(table: DeltaTable, path: str, batch: pa.RecordBatch) -> None:
    """
    Check that texts are not longer than a table's columns allow, which only Spark does: to the library all are texts.

    Raises:
        UnavailableError: One is; says of which column.
    """
    for column in table.schema().fields:
        found = _LIMITED.fullmatch(str(column.metadata.get(_TEXT_TYPE)))
        if found is None or column.name not in batch.schema.names:
            continue
        longest = pc.max(pc.utf8_length(batch.column(column.name))).as_py() or 0
        if longest > int(found["length"]):
            raise UnavailableError(
                f"column {column.name} of table {path} is {found[0]}, and unpublished output has a text of {longest} "
                "characters: let the table's column be a string"
            )


def constraints_of(table: DeltaTable) -> list[str]:
    """Return the constraints that are properties of a table, as text."""
    properties = table.metadata().configuration.items()
    return [text for name, text in properties if name.startswith(_OF_TABLE) and text is not None]


def texts_of_constraints(table: DeltaTable) -> list[str]:
    """Return all constraints of a table, as text; those of columns, too."""
    found = [column.metadata.get(_OF_COLUMN) for column in table.schema().fields]
    return [*constraints_of(table), *(_expression(str(text)) for text in found if text is not None)]


def _expression(invariant: str) -> str:
    """Return the expression of a column's invariant; the text itself, which is not plain, if it has another form."""
    with suppress(ValueError, TypeError, LookupError):
        return str(parse_json(invariant)["expression"]["expression"])
    return invariant


def _is_plain(text: str, types: Mapping[str, pa.DataType]) -> bool:
    """Return whether an expression consists of comparisons of columns with values of their types."""

    def checked(term: re.Match[str]) -> str:
        name = term["name"].strip("`")
        values = [term["value"], term["least"], term["most"], *re.findall(_VALUE, term["values"] or "")]
        is_plain = name in types and all(_is_of(value, types[name]) for value in values if value is not None)
        return " true " if is_plain else term[0]

    return len(text) <= _CHARS_MAX and _WORDS.fullmatch(_TERM.sub(checked, text)) is not None


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
