"""Checks, before a query starts, that its output fits a table of PostgreSQL: columns, types, index, rights."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import psycopg
import pyarrow as pa

from backend_client.sinks.postgres.catalog import in_catalog, oid_of
from backend_client.sinks.postgres.types import ColumnType, fits, wanted_type
from storage.errors import InvalidInputError, UnavailableError

_FIND = """
select c.relkind::text, c.relpersistence::text, row_security_active(c.oid),
  has_database_privilege(current_database(), 'temp'), has_table_privilege(c.oid, 'delete')
from pg_class c where c.oid = %s::oid
"""
_COLUMNS = """
with recursive kind(name, oid, typmod) as (
  select attname, atttypid, atttypmod from pg_attribute
  where attrelid = %(table)s::oid and attnum > 0 and not attisdropped
  union all select name, typbasetype, greatest(typmod, typtypmod)
  from kind join pg_type on pg_type.oid = kind.oid where typtype = 'd'
)
select a.attname::text, t.typname::text, t.typcategory::text, e.typname::text, e.typcategory::text,
  case when k.typmod < 0 then null
    when ltrim(t.typname, '_') = 'numeric' then ((k.typmod - 4 & 2047) # 1024) - 1024
    when ltrim(t.typname, '_') in ('time', 'timestamp', 'timestamptz') then k.typmod
    -- Bit 28 says that there are seconds; 65535, that they have all digits.
    when ltrim(t.typname, '_') = 'interval' and k.typmod & (1 << 28) = 0 then 0
    when ltrim(t.typname, '_') = 'interval' then least(k.typmod & 65535, 6) end,
  a.attnotnull and not a.atthasdef and a.attidentity = '', a.attgenerated <> '', a.attidentity = 'a', a.attnotnull,
  array(select p from unnest(array['select', 'insert', 'update']) p where has_column_privilege(a.attrelid, a.attnum, p))
from pg_attribute a join kind k on k.name = a.attname join pg_type t on t.oid = k.oid and t.typtype <> 'd'
left join pg_type e on e.oid = t.typelem and t.typcategory = 'A'
where a.attrelid = %(table)s::oid and a.attnum > 0 and not a.attisdropped
"""
_KEYS = """
select array(select a.attname::text from unnest((i.indkey::int2[])[0:i.indnkeyatts - 1]) n
  join pg_attribute a on a.attrelid = i.indrelid and a.attnum = n),
  coalesce((to_jsonb(i) ->> 'indnullsnotdistinct')::bool, false),
  -- Of collations by which different texts are equal, the index must have the column's own.
  i.indimmediate and not exists (
    select from unnest((i.indkey::int2[])[0:i.indnkeyatts - 1], i.indcollation::oid[]) as p(number, own)
    join pg_attribute a on a.attrelid = i.indrelid and a.attnum = p.number and a.attcollation <> p.own
    join pg_collation c on c.oid in (a.attcollation, p.own)
    where not (to_jsonb(c) ->> 'collisdeterministic')::bool
  ) and not exists (
    -- Rows of a key are told apart by the column's type, whose operator must be that of the index.
    with recursive base(number, class, type) as (
      select p.number, p.class, a.atttypid from unnest((i.indkey::int2[])[0:i.indnkeyatts - 1], i.indclass::oid[])
        as p(number, class) join pg_attribute a on a.attrelid = i.indrelid and a.attnum = p.number
      union all select number, class, typbasetype from base join pg_type on pg_type.oid = type where typtype = 'd'
    )
    select from base b join pg_opclass own on own.oid = b.class
    join pg_opclass usual on usual.opcintype = b.type and usual.opcdefault and usual.opcmethod = own.opcmethod
    join pg_amop o on o.amopfamily = own.opcfamily and o.amopstrategy = 3
      and o.amoplefttype = own.opcintype and o.amoprighttype = own.opcintype
    join pg_amop u on u.amopfamily = usual.opcfamily and u.amopstrategy = 3
      and u.amoplefttype = usual.opcintype and u.amoprighttype = usual.opcintype
    where o.amopopr <> u.amopopr
  )
from pg_index i
where i.indrelid = %s::oid and i.indisunique and i.indisvalid and i.indpred is null and i.indexprs is null
"""
_TABLES = ("r", "p")  # plain and partitioned ones
# By default names are first looked for in a schema of the user's name, which whoever may create schemas could make.
_STRANGER = """
select s.rolname::text from pg_class c join pg_namespace n on n.oid = c.relnamespace
join pg_roles s on s.oid = n.nspowner join pg_database d on d.datname = current_database()
where c.oid = %s::oid and n.nspname = current_user and n.nspowner <> d.datdba and s.rolname <> current_user
  and not s.rolsuper and (current_setting('is_superuser')::bool or not pg_has_role(n.nspowner, 'member'))
"""
_PARTITIONS = """
select c.oid::regclass::text, c.relkind::text, c.relpersistence::text
from pg_partition_tree(%s::oid) p join pg_class c on c.oid = p.relid where p.isleaf
"""


@dataclass(frozen=True, slots=True)
class _Column:
    type: ColumnType
    is_required: bool
    is_generated: bool
    is_always_numbered: bool
    is_not_null: bool
    rights: frozenset[str]


def check_table(
    connection: psycopg.Connection,
    table: str,
    name: str,
    columns: pa.Schema,
    key: Sequence[str],
    delete_when: str | None,
) -> None:
    """
    Check that output can be written to a table.

    Args:
        connection: To its database.
        table: The table as SQL names it.
        name: The table as the user named it.
        columns: The output columns.
        key: The sink's key; empty if rows are added.
        delete_when: The column whose rows delete; not one of the table.

    Raises:
        InvalidInputError: They do not fit; says what is there and what is needed.
    """
    oid = oid_of(connection, table)
    wanted = [column for column in columns.names if column != delete_when]
    with in_catalog(connection):
        found = connection.execute(_FIND, [oid]).fetchone()
        if oid is None or found is None:
            raise InvalidInputError(
                f"table {name} does not exist; create it with the columns {_typed(columns, wanted)}"
            )
        check_schema(connection, oid, name)
        kind, persistence, has_row_security, may_use_temporary, may_delete = found
        check_is_kept(connection, oid, name, kind, persistence)
        _check_row_security(name, applies=has_row_security)
        there = _columns(connection, oid)
        _check_columns(name, there, columns, wanted)
        if key:
            may_be_null = [column for column in key if columns.field(column).nullable]
            _check_key(connection, oid, name, there, columns, key, may_be_null)
    rights = {"insert", "select", "update"} if key else {"insert"}
    missing = sorted({right for column in wanted for right in rights - there[column].rights})
    missing += ["delete"] * (delete_when is not None and not may_delete)
    if missing:
        raise InvalidInputError(
            f"the sink's user may not {', '.join(missing)}: grant {', '.join(missing)} on table {name} to it"
        )
    if key and not may_use_temporary:
        raise InvalidInputError("upserts need temporary tables: grant temporary on the database to the sink's user")


def check_still_fits(
    connection: psycopg.Connection,
    table: str,
    name: str,
    columns: pa.Schema,
    key: Sequence[str],
    delete_when: str | None,
    null_keys: Collection[str],
) -> None:
    """
    Check, in the transaction that writes, that a table which was altered since still takes the values unchanged.

    Values would be rounded, moved to another time zone or cut off, rows would be lost with the server or replace those
    of other keys, and each batch would add another row for a key that is null.

    Args:
        connection: To its database.
        table: The table as SQL names it.
        name: The table as the user named it.
        columns: The columns of the records, which may be those of an earlier query.
        key: The sink's key; empty if rows are added.
        delete_when: The column whose rows delete; not one of the table.
        null_keys: Columns of the key that are null in a record.

    Raises:
        UnavailableError: Table and records no longer fit; says what is there and what is needed.
    """
    oid = oid_of(connection, table)
    try:
        with in_catalog(connection):
            found = connection.execute(_FIND, [oid]).fetchone()
            if oid is None or found is None:
                raise UnavailableError(f"table {name} no longer exists: create it again")
            check_schema(connection, oid, name)
            kind, persistence, has_row_security, *_ = found
            _check_row_security(name, applies=has_row_security)
            check_is_kept(connection, oid, name, kind, persistence)
            wanted = [column for column in columns.names if column != delete_when]
            there = _columns(connection, oid)
            _check_columns(name, there, columns, wanted)
            if key:
                _check_key(connection, oid, name, there, columns, key, null_keys)
    except InvalidInputError as error:
        raise UnavailableError(
            f"table {name} was altered, or the query was changed, while its output was unpublished: {error}"
        ) from error


def _check_row_security(name: str, *, applies: bool) -> None:
    """Raise `InvalidInputError` if the user does not see all rows: it would not delete what it does not see."""
    if applies:
        raise InvalidInputError(
            f"row-level security of table {name} applies to the sink's user, which then cannot COPY, and deletes only "
            "the rows that it sees: alter the user to bypass it"
        )


def check_schema(connection: psycopg.Connection, oid: int, name: str) -> None:
    """Raise `InvalidInputError` if a name without a schema led to one that somebody else gave the user's own name."""
    stranger = None if "." in name else connection.execute(_STRANGER, [oid]).fetchone()
    if stranger is not None:
        raise InvalidInputError(
            f"the table {name} is in a schema that has the name of the sink's user and belongs to user {stranger[0]}, "
            "whose triggers would have the rights of the sink's user: name the table with the schema that is meant, or "
            "alter the schema's owner to the sink's user"
        )


def check_is_kept(connection: psycopg.Connection, oid: int, name: str, kind: str, persistence: str) -> None:
    """Raise `InvalidInputError` unless a table and its parts are here, and survive a crash: the log gives rows up."""
    if kind not in _TABLES:
        raise InvalidInputError(
            f"{name} is a view or foreign table, whose rows may be lost or committed without their marker; name a table"
        )
    parts = connection.execute(_PARTITIONS, [oid]).fetchall()
    if foreign := [part for part, kind, _ in parts if kind == "f"]:
        raise InvalidInputError(
            f"partition {', '.join(foreign)} of table {name} is on another server, where rows would be committed apart "
            "from their marker: detach it, or name another table"
        )
    for part, how in ((name, persistence), *((part, how) for part, _, how in parts)):
        if how != "p":
            raise InvalidInputError(
                f"table {part} is unlogged or temporary: a crash would lose what was published; "
                f"alter table {part} set logged"
            )


def _columns(connection: psycopg.Connection, oid: int) -> dict[str, _Column]:
    found = {}
    for row in connection.execute(_COLUMNS, {"table": oid}).fetchall():
        column, kind, category, element, element_category, scale, *facts, rights = row
        required, generated, numbered, not_null = facts
        of = None if element is None else ColumnType(element, element_category, scale=scale)
        type_ = ColumnType(kind, category, of, scale)
        found[column] = _Column(type_, required, generated, numbered, not_null, frozenset(rights))
    return found


def _check_columns(name: str, there: Mapping[str, _Column], columns: pa.Schema, wanted: Sequence[str]) -> None:
    missing = [column for column in wanted if column not in there]
    if missing:
        raise InvalidInputError(
            f"table {name} lacks {_typed(columns, missing)}; it has {', '.join(there)}: add them, or select others"
        )
    required = [column for column, its in there.items() if its.is_required and column not in wanted]
    if required:
        raise InvalidInputError(
            f"columns {', '.join(required)} of table {name} are not null, have no default, and are not in the result; "
            f"it has {', '.join(columns.names)}"
        )
    for column in wanted:
        its = there[column]
        if its.is_generated:
            raise InvalidInputError(f"column {column} of table {name} is generated: leave it out of the result")
        given = columns.field(column).type
        if not fits(given, its.type):
            raise InvalidInputError(
                f"column {column} is {given} in the result and {its.type} in table {name}: cast it in the query, or "
                f"alter it to {wanted_type(given)}",
                column=column,
            )


def _check_key(
    connection: psycopg.Connection,
    oid: int,
    name: str,
    there: Mapping[str, _Column],
    columns: pa.Schema,
    key: Sequence[str],
    null_keys: Collection[str],
) -> None:
    found = connection.execute(_KEYS, [oid]).fetchall()
    unique = [set(names) for names, _, is_usable in found if is_usable]
    if set(key) not in unique:
        has = "; ".join(", ".join(sorted(names)) for names in unique) or "none"
        raise InvalidInputError(
            f"table {name} needs a unique index on exactly {', '.join(key)}, without a condition and in the columns' "
            f"own collations and operator classes; it has: {has}. alter table {name} add primary key ({', '.join(key)})"
        )
    if any(set(names) == set(key) and not is_usable for names, _, is_usable in found):
        raise InvalidInputError(
            f"table {name} has a second unique index on exactly {', '.join(key)} that is deferrable or has another "
            "collation or operator class, by which rows of other keys would be replaced, too: drop it"
        )
    may_be_null = [column for column in key if column in null_keys and not there[column].is_not_null]
    if may_be_null and not any(set(names) == set(key) and finds_nulls for names, finds_nulls, _ in found):
        nulls = ", ".join(may_be_null)
        raise InvalidInputError(
            f"the unique index of table {name} does not find rows whose key is null, so each batch would add another "
            f"row instead of replacing it: alter table {name} {_not_null(may_be_null)}, and leave out rows with null "
            f"in {nulls}; or create the index as unique nulls not distinct (PostgreSQL 15 and later)"
        )
    numbered = [column for column, its in there.items() if its.is_always_numbered and column in columns.names]
    if numbered:
        raise InvalidInputError(
            f"column {', '.join(numbered)} of table {name} is always generated, so no row of an upsert can name it; "
            "generate it by default, or leave it out of the result"
        )


def _not_null(columns: Sequence[str]) -> str:
    return ", ".join(f"alter column {column} set not null" for column in columns)


def _typed(columns: pa.Schema, names: Sequence[str]) -> str:
    return ", ".join(f"{name} {wanted_type(columns.field(name).type)}" for name in names)
