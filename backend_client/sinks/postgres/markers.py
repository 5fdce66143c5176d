"""The table of markers: checked at the start, and before each opening of a slot."""

from __future__ import annotations

import psycopg
from psycopg import sql

from backend_client.sinks.postgres.catalog import in_catalog, oid_of
from backend_client.sinks.postgres.check import check_is_kept, check_schema
from backend_client.sinks.protocol import MARKER_CHARS_MAX, Marker, Slot
from storage.errors import CorruptDataError, InvalidInputError, UnavailableError

MARKER = sql.SQL("pg_catalog.left(marker, {})").format(MARKER_CHARS_MAX + 1)
"""A marker as far as it is read: others may have put a text of any length in its place."""
# A superuser is a member of every role.
_MARKERS = """
select n.nspname::text, c.relname::text, c.relkind::text, c.relpersistence::text, pg_get_userbyid(c.relowner)::text,
  c.relowner in (n.nspowner, d.datdba) or o.rolsuper or pg_get_userbyid(c.relowner) = current_user
    or (pg_has_role(c.relowner, 'member') and not current_setting('is_superuser')::bool),
  array(select p from unnest(array['select', 'insert', 'update']) p where not has_table_privilege(c.oid, p))
from pg_class c join pg_namespace n on n.oid = c.relnamespace join pg_roles o on o.oid = c.relowner
join pg_database d on d.datname = current_database() where c.oid = %s::oid
"""


def check_markers(connection: psycopg.Connection, markers: str, name: str) -> sql.Identifier | None:
    """
    Check the table of markers; return its name with its schema, None if it does not exist.

    Whatever others create afterwards, this name leads to no other table.

    Args:
        connection: To its database.
        markers: The table as SQL names it.
        name: The table as the user named it.

    Raises:
        InvalidInputError: It cannot be used, or belongs to a user who is not trusted with the sink's rights: a table's
            triggers and constraints run with the rights of the user who writes to it.
    """
    oid = oid_of(connection, markers)
    if oid is None:
        return None
    with in_catalog(connection):
        found = connection.execute(_MARKERS, [oid]).fetchone()
        if found is None:
            return None
        schema, table, kind, persistence, owner, is_trusted, missing = found
        check_schema(connection, oid, name)
        if not is_trusted:
            raise InvalidInputError(
                f"the table {name} of the sink's markers belongs to user {owner}, whose triggers would have the rights "
                "of the sink's user. If that is right, alter its owner to the sink's user or to the owner of its "
                "schema; if not, name another one with markers=, in a schema where only trusted users may create tables"
            )
        check_is_kept(connection, oid, name, kind, persistence)
    if missing:
        raise InvalidInputError(f"grant {', '.join(missing)} on table {name} to the sink's user")
    return sql.Identifier(schema, table)


def found_markers(connection: psycopg.Connection, markers: str, name: str) -> sql.Identifier:
    """
    Check the table of markers again: others may have put another one in its place since the start.

    Args and return value as in `check_markers`.

    Raises:
        UnavailableError: It is gone, or can no longer be used.
    """
    try:
        found = check_markers(connection, markers, name)
    except InvalidInputError as error:
        raise UnavailableError(f"the table of markers was altered or replaced: {error}") from error
    if found is None:
        raise UnavailableError(f"the table {name} of the sink's markers no longer exists: restore it")
    return found


def stored_marker(text: str | None, slot: Slot, table: str) -> Marker | None:
    """Return a slot's marker as the table of markers has it; `CorruptDataError` if it has another text there."""
    try:
        return None if text is None else Marker.parse(text)
    except InvalidInputError as error:
        raise CorruptDataError(
            f"table {table} has no marker for slot {slot.number} of sink {slot.sink!r}: {error}; only the sink may "
            "write there: restore the marker, or give the sink another name to continue without it"
        ) from error
