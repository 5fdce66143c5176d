"""Which table an operator has after it was renamed, removed or added at a restart."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend_client.settings import BackendSettings
from backend_client.spark.start.operator_tables import OperatorTables, assign_tables
from dstl_service.wire import REMOVED, SET_ASIDE, SINK, OperatorInfo, RowsSetAside
from storage.errors import InvalidInputError

OLD, OTHER = OperatorInfo("old", 4, "{}", {}), OperatorInfo("other", 2, "{}", {})
OUT = OperatorInfo("out", 1, "KafkaSink", {}, kind=SINK)


def settings(**options: Any) -> BackendSettings:
    return BackendSettings.of("file:///tmp/s", "job", options)


def stored_after(operators: list[str], tables: OperatorTables) -> list[OperatorInfo]:
    """Return what the checkpoint after such a start says."""
    infos = []
    for name in operators:
        table = tables.names[name]
        known = tables.stored.get(name, OperatorInfo(table, 4, "{}", {}))
        infos.append(replace(known, name=table, called=None if table == name else name))
    return [*infos, *tables.removed]


def start(operators: list[str], stored: list[OperatorInfo] | None, **options: Any) -> list[OperatorInfo]:
    """Start a query; return what its first checkpoint says."""
    return stored_after(operators, assign_tables(operators, stored, settings(**options)))


def test_renamed_operator_keeps_its_table() -> None:
    """The table has its first name through all renames, and the setting may stay in the program."""
    first = start(["new"], [OLD], renamed={"old": "new"})
    assert [(info.name, info.called, info.renamed_from) for info in first] == [("old", "new", "old")]
    assert start(["new"], first, renamed={"old": "new"}) == first
    assert start(["new"], first) == first
    second = start(["newer"], first, renamed={"new": "newer"})
    assert [(info.name, info.called, info.renamed_from) for info in second] == [("old", "newer", "new")]
    assert start(["newer"], second, renamed={"new": "newer"}) == second
    back = start(["old"], second, renamed={"newer": "old"})
    assert [(info.name, info.called, info.renamed_from) for info in back] == [("old", None, "newer")]


def test_name_of_a_table_never_comes_again() -> None:
    """A new operator of a name that a renamed or removed one's table has gets a table of another name."""
    renamed = start(["new"], [OLD], renamed={"old": "new"})
    assert [info.name for info in start(["new", "old"], renamed)] == ["old", "old.2"]
    removed = start(["other"], [OLD, OTHER], removed=("old",))
    assert [(info.name, info.kind) for info in removed] == [("other", None), ("old", REMOVED)]
    assert start(["other"], removed, removed=("old",)) == removed
    again = start(["other", "old"], removed)
    assert [(info.name, info.called) for info in again] == [("other", None), ("old.2", "old"), ("old", None)]
    gone = start(["other"], again, removed=("old",))
    assert [(info.name, info.label) for info in gone] == [("other", "other"), ("old", "old"), ("old.2", "old")]
    assert [info.name for info in start(["old", "other", "old.3"], gone)][:3] == ["old.4", "other", "old.3"]


@pytest.mark.parametrize(
    ("operators", "options", "message"),
    [
        (["new", "other"], {}, r"state of the operator\(s\) old, .*renamed=\{'old': 'new'\}; .*removed=\('old',\)"),
        (["other"], {}, r"renamed=\{'old': its new name\}; or give up their state: removed=\('old',\)"),
        (["new", "other"], {"renamed": {"odl": "new"}}, "has no operator 'odl'; it has state of old, other"),
        (["new", "other"], {"renamed": {"old": "nwe"}}, "the query has no operator 'nwe'; it has new, other"),
        (["other"], {"renamed": {"old": "other"}}, "has state of both"),
        (["old", "other"], {"renamed": {"old": "other"}}, "has an operator 'old', too"),
        (["old", "other", "new"], {"renamed": {"old": "new"}}, "has an operator 'old', too"),
        (["old", "other"], {"removed": ["none"]}, "has no such operator; it has state of old, other"),
        (["old", "other"], {"removed": ["old"]}, "the query has this operator"),
        (["old", "other"], {"removed": ["out"]}, r"it is a sink; option\('abandonOutput', 'out'\)"),
        (["old", "other", "out"], {}, "has a sink or rows set aside under the name 'out'"),
    ],
)
def test_what_does_not_fit_is_refused(operators: list[str], options: dict[str, Any], message: str) -> None:
    """A missing operator, a wrong name and a contradiction are refused with what to write."""
    with pytest.raises(InvalidInputError, match=message):
        assign_tables(operators, [OLD, OTHER, OUT], settings(**options))


@pytest.mark.parametrize("options", [{"renamed": {"old": "new"}}, {"removed": ["old"]}])
def test_new_job_has_nothing_to_change(options: dict[str, Any]) -> None:
    """Without a checkpoint the settings are refused: job name or storage may be wrong."""
    with pytest.raises(InvalidInputError, match="has no checkpoint yet"):
        assign_tables(["new"], None, settings(**options))


def test_rows_that_wait_are_not_removed_unseen() -> None:
    """Deferred rows must run before, lost ones must be given up; then their entry goes with the operator."""
    waiting, lost = (RowsSetAside(4, 0, 9, 5, 70, is_lost=is_lost) for is_lost in (False, True))

    def job(*entries: RowsSetAside) -> list[OperatorInfo]:
        return [OLD, OTHER, OperatorInfo("old.set-aside", 4, "", {}, kind=SET_ASIDE, set_aside=list(entries))]

    with pytest.raises(InvalidInputError, match="5 rows of operator 'old' wait in the log"):
        start(["other"], job(waiting), removed=["old"], lost_rows="forget")
    with pytest.raises(InvalidInputError, match="5 lost rows of operator 'old' are kept"):
        start(["other"], job(lost), removed=["old"])
    for after in (
        start(["other"], job(lost), removed=["old"], lost_rows="forget"),
        start(["other"], job(), removed=["old"]),
    ):
        assert {info.name for info in after if info.kind == REMOVED} == {"old", "old.set-aside"}


NAMES = st.sampled_from(["a", "b", "a.2", "c"])


@given(st.lists(st.tuples(st.lists(NAMES, unique=True, min_size=1), NAMES, NAMES, st.booleans()), max_size=12))
def test_state_follows_its_operator_through_any_restarts(steps: list[tuple[list[str], str, str, bool]]) -> None:
    """
    I14: each table ever belongs to one operator, which is found under its present name as long as it is not removed.

    Each step is a start that may rename or remove one operator, or is refused and changes nothing.
    """
    stored: list[OperatorInfo] | None = None
    owners: dict[str, str] = {}  # present name to table, as a plain model keeps it
    ever: set[str] = set()
    for operators, name, other, removes in steps:
        options: dict[str, Any] = {}
        if stored is not None and name not in operators and name in owners:
            options = {"removed": [name]} if removes else {"renamed": {name: other}}
        try:
            tables = assign_tables(operators, stored, settings(**options))
        except InvalidInputError:
            continue
        if options.get("removed"):
            del owners[name]
        elif options:
            owners[other] = owners.pop(name)
        for operator in operators:
            table = tables.names[operator]
            if operator in owners:
                assert owners[operator] == table == tables.stored[operator].name
            else:
                assert table not in ever
                assert operator not in tables.stored
                owners[operator] = table
        assert owners.keys() == {*operators}
        ever |= {*owners.values()}
        stored = stored_after(operators, tables)
        assert {info.name for info in stored} == ever
