"""
Parses schemas such as ``"n long, tags array<string>"`` without Spark, for `StateTester`.

Accepts Spark's syntax for the types that state can hold, and returns Spark's JSON form. In queries Spark itself parses;
a test compares the two.
No I/O.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from storage.errors import InvalidInputError

_TOKEN = re.compile(r"\s*(?:(?P<word>\w+)|`(?P<quoted>(?:[^`]|``)+)`|'(?P<text>(?:[^'\\]|\\.)*)'|(?P<sign>[<>(),:]))")
_SIMPLE = {
    "bigint": "long",
    "binary": "binary",
    "boolean": "boolean",
    "byte": "byte",
    "date": "date",
    "double": "double",
    "float": "float",
    "int": "integer",
    "integer": "integer",
    "long": "long",
    "real": "float",
    "short": "short",
    "smallint": "short",
    "string": "string",
    "timestamp": "timestamp",
    "timestamp_ltz": "timestamp",
    "timestamp_ntz": "timestamp_ntz",
    "tinyint": "byte",
    "void": "void",
}
_DECIMALS = ("decimal", "dec", "numeric")
_PRECISION, _SCALE = 10, 0
_TIME_DIGITS = 6
_UNITS = ("day", "hour", "minute", "second")
_END = ("", "")


def parse_schema(text: str) -> dict[str, Any]:
    """
    Return the struct type of a schema text, in Spark's JSON form.

    Raises:
        InvalidInputError: The text is not a schema of named columns, or state cannot hold one of its types.
    """
    parser = _Parser(text)
    if parser.takes_word("struct") and parser.next_is("<"):
        kind = parser.struct()
    else:
        parser = _Parser(text)
        kind = {"type": "struct", "fields": parser.fields(end="")}
    parser.expect("")
    return kind


class _Parser:
    """A one-pass parser with one token of lookahead."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._rest = text
        self._kind, self._token = _END
        self._advance()

    def fields(self, end: str) -> list[dict[str, Any]]:
        """Read fields up to the closing token, exclusive."""
        fields: list[dict[str, Any]] = []
        while not (self.next_is(end) if end else self._kind == ""):
            if fields:
                self.expect(",")
            name = self._name()
            if self.next_is(":"):
                self._advance()
            kind = self._type()
            nullable, metadata = True, dict[str, str]()
            if self.takes_word("not"):
                self._word("null")
                nullable = False
            if self.takes_word("comment"):
                metadata["comment"] = self._quoted_text()
            fields.append({"name": name, "type": kind, "nullable": nullable, "metadata": metadata})
        return fields

    def struct(self) -> dict[str, Any]:
        """Read a struct's fields, after the word "struct"."""
        self.expect("<")
        fields = self.fields(end=">")
        self.expect(">")
        return {"type": "struct", "fields": fields}

    def expect(self, sign: str) -> None:
        """Read one sign, or the end of the text."""
        if self._token != sign or self._kind not in ("sign", ""):
            raise self._error(f"{sign!r}" if sign else "its end")
        self._advance()

    def next_is(self, sign: str) -> bool:
        """Return whether a sign comes next."""
        return (self._kind, self._token) == ("sign", sign)

    def takes_word(self, word: str) -> bool:
        """Read a word, if it comes next."""
        found = self._kind == "word" and self._token.lower() == word
        if found:
            self._advance()
        return found

    def _type(self) -> Any:
        word = self._word().lower()
        if word == "struct":
            return self.struct()
        if word == "array":
            self.expect("<")
            element = self._type()
            self.expect(">")
            return {"type": "array", "elementType": element, "containsNull": True}
        if word == "map":
            self.expect("<")
            key = self._type()
            self.expect(",")
            value = self._type()
            self.expect(">")
            return {"type": "map", "keyType": key, "valueType": value, "valueContainsNull": True}
        if word in _DECIMALS:
            precision, scale = (*self._numbers(), _SCALE)[:2] if self.next_is("(") else (_PRECISION, _SCALE)
            return f"decimal({precision},{scale})"
        if word in ("char", "varchar"):
            return f"{word}({self._numbers()[0]})"
        if word == "time":
            return f"time({self._numbers()[0] if self.next_is('(') else _TIME_DIGITS})"
        if word == "interval":
            return self._interval()
        if word not in _SIMPLE:
            raise InvalidInputError(f"{self._text!r}: state cannot hold the type {word}")
        return _SIMPLE[word]

    def _interval(self) -> str:
        first = self._unit(_UNITS)
        if not self.takes_word("to"):
            return f"interval {first}"
        return f"interval {first} to {self._unit(_UNITS[_UNITS.index(first) + 1 :])}"

    def _unit(self, units: Sequence[str]) -> str:
        unit = self._word().lower()
        if unit not in units:
            raise InvalidInputError(f"{self._text!r}: state cannot hold intervals of {unit!r}")
        return unit

    def _numbers(self) -> list[int]:
        self.expect("(")
        numbers = [self._number()]
        while self.next_is(","):
            self._advance()
            numbers.append(self._number())
        self.expect(")")
        return numbers

    def _number(self) -> int:
        if not self._token.isdecimal():
            raise self._error("a number")
        return int(self._word())

    def _word(self, wanted: str | None = None) -> str:
        word = self._token
        if self._kind != "word" or (wanted is not None and word.lower() != wanted):
            raise self._error(wanted or "a word")
        self._advance()
        return word

    def _name(self) -> str:
        if self._kind not in ("word", "quoted"):
            raise self._error("a name")
        name = self._token.replace("``", "`")
        self._advance()
        return name

    def _quoted_text(self) -> str:
        if self._kind != "text":
            raise self._error("text in single quotes")
        text = self._token
        self._advance()
        return re.sub(r"\\(.)", r"\1", text)

    def _advance(self) -> None:
        found = _TOKEN.match(self._rest)
        if found is None:
            if self._rest.strip():
                raise InvalidInputError(f"{self._text!r} is not a schema: {self._rest.strip()[:20]!r} cannot be parsed")
            self._kind, self._token, self._rest = *_END, ""
            return
        self._kind = str(found.lastgroup)
        self._token = found[self._kind]
        self._rest = self._rest[found.end() :]

    def _error(self, wanted: str) -> InvalidInputError:
        found = repr(self._token) if self._kind else "its end"
        return InvalidInputError(f"{self._text!r} is not a schema: found {found}, expected {wanted}")
