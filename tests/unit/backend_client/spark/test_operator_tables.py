"""Which table an operator has after it was renamed, removed or added at a restart."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.types import StructType

from backend_client.settings import BackendSettings
from backend_client.spark.query import Operator
from backend_client.spark.start.checks import check_names, check_start
from backend_client.spark.start.operator_tables import OperatorTables, assign_tables, check_numbers
from dstl_service.wire import REMOVED, SET_ASIDE, SINK, CheckpointInfo, CheckpointRef, OperatorInfo, RowsSetAside
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


def test_rows_set_aside_have_a_name_of_their_own() -> None:
    """They would count for nothing under the name of a removed operator, and be published under that of a sink."""
    removed = start(["other"], [OperatorInfo("old.set-aside", 4, "{}", {}), OTHER], removed=["old.set-aside"])
    assert [info.name for info in start(["other", "old"], removed)][:2] == ["other", "old.2"]
    check_names([OLD, OTHER, OUT])
    with pytest.raises(InvalidInputError, match=r"under the name 'old\.set-aside': give the sink another name"):
        check_names([OLD, OTHER, replace(OUT, name="old.set-aside")])


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


TOTALS, TOTALS_2 = OperatorInfo("Totals", 4, "{}", {}), OperatorInfo("old", 4, "{}", {}, called="Totals-2")


@pytest.mark.parametrize(
    ("stored", "operators", "unnamed", "is_refused"),
    [
        ([TOTALS, TOTALS_2], ["Totals"], ["Totals"], True),
        ([TOTALS], ["Totals", "Totals-2"], ["Totals", "Totals-2"], True),
        ([TOTALS, TOTALS_2], ["Sums", "Totals"], ["Sums", "Totals"], True),
        ([TOTALS, TOTALS_2], ["Totals", "Totals-2", "Totals-3"], ["Totals-3"], True),
        ([TOTALS, TOTALS_2], ["Totals", "other", "Totals-2"], ["Totals", "Totals-2"], False),
        ([TOTALS, TOTALS_2], ["Totals-2"], [], False),
        ([TOTALS], ["Sums"], ["Sums"], False),
        ([TOTALS], ["Totals", "Totals-hot"], ["Totals"], False),
        ([OTHER], ["other", "Totals", "Totals-2"], ["Totals", "Totals-2"], False),
        ([OTHER, replace(TOTALS, kind=REMOVED)], ["other", "Totals"], ["Totals"], False),
    ],
)
def test_numbers_do_not_move_state(
    stored: list[OperatorInfo], operators: list[str], unnamed: list[str], is_refused: bool
) -> None:
    """If one of `Totals` and `Totals-2` comes or goes, the other one's name is no sign of which state is its."""
    with pytest.raises(InvalidInputError, match="name=…") if is_refused else nullcontext():
        check_numbers(operators, unnamed, stored, "job")


def test_start_with_moved_numbers_is_refused() -> None:
    """The check stands before that for removed operators: the state of the last number is not what was given up."""
    nothing: Any = None
    operator = Operator("Totals", nothing, (), StructType(), StructType(), {}, None, (), is_named=False)
    query: Any = SimpleNamespace(operators=[operator], settings=settings(removed=["Totals-2"], parallelism=4))
    stored = [replace(info, key_schema=StructType().json()) for info in (TOTALS, TOTALS_2)]
    ref = CheckpointRef(9, 0, "m")
    latest = CheckpointInfo(ref, ref, 1, 0, "q", "", stored, 0, 0, rewound_from=ref)
    log: Any = SimpleNamespace(query_id=lambda: "q", location="file:///tmp/c")
    with pytest.raises(InvalidInputError, match="has state of Totals, Totals-2, the query has Totals:"):
        check_start(query, log, latest, 128)


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
