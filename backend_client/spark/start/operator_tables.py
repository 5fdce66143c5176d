"""
Which table each operator of a starting query has: operators may have been renamed, removed or added. No I/O.

A table keeps the name that its operator had at first: stored objects and local folders bear it, and nothing is
rewritten. A renamed operator only gets another `called`. For a removed one, every later checkpoint has an entry without
a table, so that no other table gets its name: a host may still have its former folder, which would be taken for the
new table's. Both are part of the first checkpoint after the start; until then, and after a rewind to before it, the
operator is what it was.

The settings may stay in the program: what a checkpoint already says is accepted and changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from backend_client.failover.set_aside_entries import companion_of
from backend_client.settings import FORGET, BackendSettings
from dstl_service.wire import REMOVED, OperatorInfo, validate_operator
from storage.errors import InvalidInputError


@dataclass(frozen=True, slots=True)
class OperatorTables:
    """
    The tables of a query.

    Args:
        names: The name of each operator's table, by the operator's name in the query.
        stored: What the newest checkpoint says of it, by the same name; a new operator has no entry.
        removed: The entries of operators that were removed now or earlier.
    """

    names: Mapping[str, str]
    stored: Mapping[str, OperatorInfo]
    removed: tuple[OperatorInfo, ...]


def assign_tables(
    operators: Sequence[str], stored: Sequence[OperatorInfo] | None, settings: BackendSettings
) -> OperatorTables:
    """
    Return the tables of a query's operators, as the settings `renamed` and `removed` say.

    Args:
        operators: The names of the query's operators.
        stored: The operators of the newest checkpoint; None if there is no checkpoint.
        settings: The job's settings.

    Raises:
        InvalidInputError: An operator with state is missing; a setting names what does not exist, or contradicts the
            query; rows of a removed operator wait; or an operator has the name of a sink.
    """
    if stored is None:
        _check_first(settings)
        return OperatorTables({name: name for name in operators}, {}, ())
    tables = {info.label: info for info in stored if info.has_table}
    renamed = _renamed(operators, tables, settings)
    removed = _removed(operators, tables, stored, settings)
    known = {renamed.get(label, label): _called(info, renamed) for label, info in tables.items()}
    missing = known.keys() - {*operators, *removed}
    if missing:
        raise InvalidInputError(_missing(missing, operators, tables, settings))
    entries = [entry for info in removed.values() for entry in removed_entries(info, stored)]
    gone = (*(info for info in stored if info.kind == REMOVED), *entries)
    kept = {name: info for name, info in known.items() if name not in removed}
    return OperatorTables(_names(operators, kept, stored, settings.job), kept, gone)


def check_numbers(operators: Sequence[str], unnamed: Iterable[str], stored: Iterable[OperatorInfo], job: str) -> None:
    """
    Check operators that are numbered by their order, as `Totals` and `Totals-2`.

    Args:
        operators: The names of the query's operators.
        unnamed: Those of them that the program does not name: a class's name, maybe with a number.
        stored: The operators of the newest checkpoint.
        job: The job's name.

    Raises:
        InvalidInputError: One of them was added or removed: by its number, another one would get the state of the next.
    """
    labels = [info.label for info in stored if info.has_table]
    for base in sorted({name.partition("-")[0] for name in unnamed}):
        now, before = ({name for name in names if _is_numbered(name, base)} for names in (operators, labels))
        if before and now != before and max(len(now), len(before)) > 1:
            raise InvalidInputError(
                f"operators without a name=… are numbered by their order, and job {job!r} has state of "
                f"{_list(before)}, the query has {_list(now)}: operators may have got the numbers, and the state, of "
                "others. Give each of them a name, with transform_with_state(…, name=…) of a backend for this job: "
                "the old name for those that had state, a new name for the others"
            )


def _is_numbered(name: str, base: str) -> bool:
    return name == base or (name.startswith(f"{base}-") and name.removeprefix(f"{base}-").isdecimal())


def _check_first(settings: BackendSettings) -> None:
    given = [name for name in ("renamed", "removed") if getattr(settings, name)]
    if given:
        raise InvalidInputError(
            f"job {settings.job!r} has no checkpoint yet, so no operator can be {' or '.join(given)}: check job name "
            f"and storage ({settings.storage}); for a new job, leave out {' and '.join(given)}"
        )


def _renamed(operators: Sequence[str], tables: Mapping[str, OperatorInfo], settings: BackendSettings) -> dict[str, str]:
    """Return the operators to rename: present name to that in the query."""
    job, found = settings.job, {}
    for old, new in settings.renamed:
        if new not in operators:
            raise InvalidInputError(
                f"renamed={{{old!r}: {new!r}}}: the query has no operator {new!r}; it has {_list(operators)}"
            )
        if old in operators:
            raise InvalidInputError(
                f"renamed={{{old!r}: {new!r}}}: the query has an operator {old!r}, too. Start it once "
                "without another operator of the old name; names cannot be exchanged in one start"
            )
        if old in tables and new in tables:
            raise InvalidInputError(
                f"renamed={{{old!r}: {new!r}}}: job {job!r} has state of both; choose a name that it does not have, or "
                f"give up the state of one of them: removed=({old!r},)"
            )
        if old in tables:
            found[old] = new
        elif new not in tables or old not in (tables[new].name, tables[new].renamed_from):
            raise InvalidInputError(
                f"renamed={{{old!r}: {new!r}}}: job {job!r} has no operator {old!r}; it has state of {_list(tables)}"
            )
    return found


def _removed(
    operators: Sequence[str],
    tables: Mapping[str, OperatorInfo],
    stored: Sequence[OperatorInfo],
    settings: BackendSettings,
) -> dict[str, OperatorInfo]:
    """Return the operators to remove."""
    found = {}
    for name in settings.removed:
        setting = f"removed=({name!r},): "
        if name in operators:
            raise InvalidInputError(
                f"{setting}the query has this operator. To begin with an empty state under its name, start the query "
                "once without the operator, and then without the setting"
            )
        if name in tables:
            found[name] = tables[name]
        elif any(info.label == name and info.is_sink for info in stored):
            raise InvalidInputError(f"{setting}it is a sink; option('abandonOutput', {name!r}) gives up its output")
        elif not any(info.label == name and info.kind == REMOVED for info in stored):
            raise InvalidInputError(
                f"{setting}job {settings.job!r} has no such operator; it has state of {_list(tables)}"
            )
        if name in found:
            _check_nothing_waits(found[name], stored, settings)
    return found


def _check_nothing_waits(info: OperatorInfo, stored: Iterable[OperatorInfo], settings: BackendSettings) -> None:
    entries = [part for other in stored if other.name == companion_of(info.name) for part in other.set_aside]
    waiting, lost = (sum(part.rows for part in entries if part.is_lost == is_lost) for is_lost in (False, True))
    if waiting:
        raise InvalidInputError(
            f"{waiting} rows of operator {info.label!r} wait in the log: let the query run once more as it was, until "
            "they have run, and remove it then"
        )
    if lost and settings.lost_rows != FORGET:
        raise InvalidInputError(
            f"{lost} lost rows of operator {info.label!r} are kept: let the query run once more as it was with "
            "lost_rows='replay', or remove it with lost_rows='forget'"
        )


def _called(info: OperatorInfo, renamed: Mapping[str, str]) -> OperatorInfo:
    """Return an operator's entry, with its new name if it is renamed."""
    new = renamed.get(info.label)
    if new is None:
        return info
    return replace(info, called=None if new == info.name else new, renamed_from=info.label)


def removed_entries(info: OperatorInfo, stored: Iterable[OperatorInfo]) -> list[OperatorInfo]:
    """Return the entries that a removed operator leaves: of its table, and of rows that were set aside for it."""
    names = {info.name: info.called}
    names |= {other.name: None for other in stored if other.name == companion_of(info.name)}
    return [OperatorInfo(name, info.parallelism, "", {}, kind=REMOVED, called=called) for name, called in names.items()]


def _names(
    operators: Sequence[str], known: Mapping[str, OperatorInfo], stored: Sequence[OperatorInfo], job: str
) -> dict[str, str]:
    """Return the name of each operator's table; that of a new one has never been one, if need be with a number."""
    taken = {info.name: info for info in stored}
    names = {name: known[name].name for name in operators if name in known}
    for name in operators:
        if name in names:
            continue
        if name in taken and not (taken[name].has_table or taken[name].kind == REMOVED):
            raise InvalidInputError(
                f"job {job!r} has a sink or rows set aside under the name {name!r}; rename the operator"
            )
        names[name] = unused_name(name, [*taken, *names.values()], operators)
    return names


def unused_name(name: str, taken: Collection[str], operators: Collection[str]) -> str:
    """
    Return a name for a new table of the operator `name`, if need be with a number.

    Args:
        name: The operator.
        taken: All names that are, or were, those of tables, sinks and rows set aside.
        operators: The query's operators.
    """
    unused, number = name, 2
    # Rows that are set aside have a name as well; if it was a removed operator's, they would go with that.
    while {unused, companion_of(unused)} & {*taken} or (unused != name and unused in operators):
        unused, number = f"{name}.{number}", number + 1
    return validate_operator(unused)


def _missing(
    missing: Iterable[str], operators: Sequence[str], tables: Mapping[str, OperatorInfo], settings: BackendSettings
) -> str:
    names, new = sorted(missing), [name for name in operators if name not in tables]
    renamed = " or ".join(f"{names[0]!r}: {name!r}" for name in new) or f"{names[0]!r}: its new name"
    return (
        f"job {settings.job!r} has state of the operator(s) {', '.join(names)}, which this query does not "
        "have. Give the operators their old names (name=…); if one has another name now, say which, as in "
        f"renamed={{{renamed}}}; or give up their state: removed={tuple(names)!r}. "
        "Another job name starts without any state"
    )


def _list(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"
