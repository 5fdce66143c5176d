"""PostgreSQL's errors as those of the protocol, with what to do about them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict
from psycopg.errors import Diagnostic

from backend_client.sinks.option_values import check_text, without_values
from backend_client.sinks.postgres.types import has_nul
from storage.errors import InvalidInputError, UnavailableError

_WAIT_FOR_REPLICAS = "SyncRepWaitForLSN"
"""The function of PostgreSQL that warns; the text is in the server's language, and its code is that of any warning."""
_WITH_ROW = ("23502", "23514")
"""Errors whose detail is the row, which must not get into logs: the message names the column, or the constraint."""
_NO_PARTITION = "ExecFindPartition"
"""The function of PostgreSQL whose error has such a code, and as its detail the partition that is missing."""
_LINE_CHARS = 500
_TOLD = frozenset(
    [
        *("host", "hostaddr", "dbname", "user", "service", "servicefile", "passfile", "application_name", "options"),
        *("sslcert", "sslkey", "sslrootcert", "sslcrl", "sslcrldir", "client_encoding", "krbsrvname"),
    ]
)
"""Parts of an address that are names and places. A port is a number, which is told."""
_CONTEXT_COLUMN = re.compile(r"COPY .*, line \d+, column ([^:\n]+)")


def check_conninfo(conninfo: str) -> None:
    """Raise `InvalidInputError` if an address has a wrong form, without a part of its password."""
    check_text("conninfo", conninfo)
    try:
        given = conninfo_to_dict(conninfo)
    except psycopg.ProgrammingError:
        # libpq quotes what it does not understand, which may be a part of the password.
        raise InvalidInputError(
            "conninfo has a wrong form; it is host=... dbname=... user=..., values with spaces in '', or a "
            "postgresql:// URL"
        ) from None
    # A URL's password ends at its first @, / or ?, and errors quote what follows as the host, or as the database.
    is_url = conninfo.startswith(("postgresql://", "postgres://"))
    if is_url and any("@" in str(given.get(name) or "") for name in ("host", "port", "dbname")):
        raise InvalidInputError(
            "conninfo is a URL with more than one @: in user, password and dbname write %40 for @, %2F for / and "
            "%3F for ?"
        )


@contextmanager
def told(table: str, conninfo: str) -> Iterator[None]:
    """Turn PostgreSQL's errors into those of the protocol, without other parts of the address than names and places."""
    try:
        yield
    except psycopg.Error as error:
        state = error.sqlstate or ("22" if isinstance(error, psycopg.DataError) else "08")
        advice = {
            "08": "check that the server is up and reachable",
            "25006": "connect to the primary server, not to a standby, as a role without default_transaction_read_only",
            "22": "the table cannot hold a value of the result: change the column's type, or the query",
            "23": "a row violates a constraint of the table: change the constraint, or remove what it collides with",
            "28": "check user and password",
            "40": "it met another transaction, and is retried",
            "42": "check the table and the rights of the sink's user",
            "53": "the server has no space, memory or connections left",
        }
        remedy = advice.get(state) or advice.get(state[:2], "publishing is retried")
        text, full_text = (
            without_values(each, conninfo_to_dict(conninfo), is_told=_TOLD.__contains__)
            for each in (text_of(error), str(error))
        )
        cause = error if full_text == str(error) else type(error)(full_text)  # tracebacks show it, too
        raise UnavailableError(f"PostgreSQL refused output for table {table}: {text}; {remedy}") from cause


@contextmanager
def replicated(connection: psycopg.Connection, table: str) -> Iterator[None]:
    """
    Fail if the block's commit did not wait for synchronous replicas.

    If an administrator cancels that wait, the server has committed, and only warns that replicas may lack the commit.
    """
    unheard: list[str] = []

    def note(diagnostic: Diagnostic) -> None:
        if diagnostic.source_function == _WAIT_FOR_REPLICAS:
            unheard.append(diagnostic.message_primary or "")

    connection.add_notice_handler(note)
    try:
        yield
    finally:
        connection.remove_notice_handler(note)
    if unheard:
        raise UnavailableError(
            f"PostgreSQL did not wait until synchronous replicas have the output for table {table}: {unheard[0]}; the "
            "next try waits for them, and publishes nothing twice"
        )


def refused(table: str, names: tuple[str, ...], row: tuple[Any, ...], error: psycopg.Error) -> UnavailableError:
    """Return the error for a row that psycopg cannot write."""
    bad = [name for name, value in zip(names, row, strict=False) if has_nul(value)]
    if not bad:
        return UnavailableError(f"PostgreSQL cannot hold a row for table {table}: {text_of(error)}; change the query")
    return UnavailableError(
        f"column {', '.join(bad)} of table {table} cannot hold the character NUL (0x00), as no text in PostgreSQL can; "
        f"remove it in the query: translate({bad[0]}, '\\0', '')"
    )


def text_of(error: psycopg.Error) -> str:
    """Return what an error says, on one line, without a row; with the column in which a copy found a refused value."""
    said, lines = error.diag, [line for line in str(error).splitlines() if line.strip()][:2]
    if said.message_primary is not None:
        has_row = error.sqlstate in _WITH_ROW and said.source_function != _NO_PARTITION
        detail = None if has_row else said.message_detail
        lines = [*filter(None, (said.message_primary, detail, said.message_hint))]
    column = _CONTEXT_COLUMN.search(said.context or "")
    found = [] if column is None else [f"column {column[1]}"]
    return "; ".join([*(" ".join(line.split())[:_LINE_CHARS] for line in lines), *found])
