"""
Questions to PostgreSQL's catalogue, and the operators that compare keys.

Whoever may create functions in a schema of the search path, as all users may in ``public`` before PostgreSQL 15, can
have theirs taken for one of PostgreSQL's: for given types theirs may fit better, or theirs is found first. It would run
with the rights of the sink's user. So what is not the table's own is looked up in PostgreSQL's own schema.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import psycopg
from psycopg import sql

from storage.errors import UnavailableError

_EQUAL = """
select a.attname::text, format('operator(%%I.%%s)', n.nspname, o.oprname)
from pg_index i cross join lateral unnest(i.indkey::int2[], i.indclass::oid[]) as p(number, class)
join pg_attribute a on a.attrelid = i.indrelid and a.attnum = p.number join pg_opclass c on c.oid = p.class
join pg_amop m on m.amopfamily = c.opcfamily and m.amopmethod = c.opcmethod and m.amopstrategy = 3
  and m.amoplefttype = c.opcintype and m.amoprighttype = c.opcintype
join pg_operator o on o.oid = m.amopopr join pg_namespace n on n.oid = o.oprnamespace
where i.indrelid = %(table)s::oid and i.indisunique and i.indisvalid and i.indpred is null and i.indexprs is null
  and p.number = any((i.indkey::int2[])[0:i.indnkeyatts - 1])
  and array(select unnest((i.indkey::int2[])[0:i.indnkeyatts - 1]) order by 1) = array(
    select attnum from pg_attribute where attrelid = i.indrelid and attname = any(%(key)s::text[]) order by 1
  )
"""
# Where the search path names PostgreSQL's own schema, or that of temporary tables, behind another one, operators,
# functions and tables of that are found first. Whoever may create them there would act as the sink's user.
NEW = ("pg_temp", "dstl_new")
OF_SLOT = sql.SQL(
    "sink operator(pg_catalog.=) %s and job_uid operator(pg_catalog.=) %s and slot operator(pg_catalog.=) %s"
)


@contextmanager
def in_catalog(connection: psycopg.Connection) -> Iterator[None]:
    """Within a transaction, find PostgreSQL's own functions and operators only; an error must end the transaction."""
    connection.execute("set local search_path to pg_catalog, pg_temp")
    yield
    connection.execute("set local search_path to default")


def end_sessions(connection: psycopg.Connection, name: str) -> None:
    """
    Within a transaction, end the other sessions of the user who logged in whose names begin with this one.

    A pooler may add the client's address to their names, or give all its sessions one of its own. Another user may be
    set (``alter role … set role …``), to whom no session belongs.
    """
    with in_catalog(connection):
        connection.execute("set local role to none")
        connection.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity where pid <> pg_backend_pid() "
            "and starts_with(application_name, %s) and usename = current_user",
            [name],
        )
        connection.execute("set local role to default")


def oid_of(connection: psycopg.Connection, table: str) -> int | None:
    """Return the number of a table, as SQL names it; None if the search path has none of this name."""
    row = connection.execute("select pg_catalog.to_regclass(%s)::pg_catalog.oid", [table]).fetchone()
    return None if row is None else row[0]


def is_partitioned(connection: psycopg.Connection, table: str) -> bool:
    """Return whether a table's rows are in partitions, not in the table itself."""
    oid = oid_of(connection, table)
    with in_catalog(connection):
        row = connection.execute("select relkind = 'p' from pg_class where oid = %s", [oid]).fetchone()
    return row is not None and bool(row[0])


def equality(connection: psycopg.Connection, table: str, key: Collection[str]) -> dict[str, str]:
    """
    Return the operator for each column of a key by which the table's unique index tells keys apart, as SQL.

    Raises:
        UnavailableError: The index was dropped just now.
    """
    oid = oid_of(connection, table)
    with in_catalog(connection):
        found: dict[str, str] = dict(connection.execute(_EQUAL, {"table": oid, "key": list(key)}).fetchall())
    if lacking := [column for column in key if column not in found]:
        raise UnavailableError(f"table {table} no longer has a unique index on {', '.join(lacking)}: create it again")
    return found
