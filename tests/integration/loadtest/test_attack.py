"""The suite of hostile requests, in its short form: ``make attack`` is the long one."""

from __future__ import annotations

import pytest

from loadtest.attack.__main__ import run
from loadtest.attack.harness.case import Case, Result, judge
from loadtest.attack.harness.other_user import IS_ROOT
from loadtest.attack.harness.target import State, traces

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

GROUPS = [
    "request smuggling",
    "path traversal",
    "hostile JSON and numbers",
    "web pages",
    "forged handles and epochs",
    "bodies, trailers and bombs",
    "two users of a host",
    "tokens",
    "hung and lying peers",
    "slow and many clients",
    "links",
]


@pytest.mark.parametrize("group", GROUPS)
def test_attacks_are_held(group: str) -> None:
    """No case of a group is missed: answer, memory, other jobs and the storage are as required."""
    results = list(run(group, is_short=True))

    assert results or not IS_ROOT
    assert [f"{result.case.name}: {miss}" for result in results for miss in result.misses] == []


class Harmed:
    """A service with every kind of damage that an attack can do."""

    def begin(self) -> None:
        pass

    def answers(self, within_s: float) -> bool:
        return False

    def settle(self) -> None:
        pass

    def state(self, known: tuple[str, ...]) -> State:
        return State(1 << 40, 1e9, 2, "Fenced", ("stolen/object",))


def test_harm_is_seen() -> None:
    """A case with the right answer is still missed if service, memory, neighbour or storage was damaged."""
    result: Result = judge(Case("group", "name", lambda _: None), Harmed())

    assert len(result.misses) == 5
    assert "Fenced" in "".join(result.misses)
    assert "stolen/object" in "".join(result.misses)


def test_late_record_of_an_earlier_case_is_no_trace() -> None:
    """A late audit record of an earlier case is ignored; its other objects, and records of other jobs, are traces."""
    stored = [
        "@audit/earlier/1.json",
        "@audit/stranger/2.json",
        "earlier/job.json",
        "own/segments/a",
        "@audit/own/3.json",
    ]

    assert traces(stored, ["own"], {"own", "earlier"}) == ("@audit/stranger/2.json", "earlier/job.json")


def test_error_of_a_case_is_a_miss() -> None:
    """A case that cannot be completed has not held."""

    def fails(_: object) -> str | None:
        raise OSError("refused")

    assert "OSError: refused" in judge(Case("group", "name", fails), Harmed()).misses
