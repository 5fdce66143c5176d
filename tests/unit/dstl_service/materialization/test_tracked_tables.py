"""How many tables a sidecar keeps schedules of, whatever its callers name."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dstl_service.materialization import materializer
from dstl_service.materialization.policy import Schedule
from storage.memory_store import MemoryStore
from storage.testing import FakeClock
from tests.unit.dstl_service.http_life import Life, samples, service

PARTITIONS = 2


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def life(clock: FakeClock) -> Iterator[Life]:
    """Return a service with a job whose operator has two partitions."""
    with service(MemoryStore(), clock) as made:
        made.open()
        yield made


def operators_of(life: Life) -> set[str]:
    """Return the operators whose tables the metrics show."""
    shown = [name for name in samples(life) if name.startswith("dstl_materialization_table_bytes")]
    return {name.partition('operator="')[2].partition('"')[0] for name in shown}


def test_tables_that_callers_name_are_bounded(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    """A14: restores of operators that the job does not have are answered, and leave little behind."""
    monkeypatch.setattr(materializer, "TABLES_MIN", 3)
    operator = {"name": "op", "parallelism": PARTITIONS, "key_schema": "{}", "states": {}}
    ref = life.complete(0, None, life.append(), operators=[operator])
    most = 3 + materializer.TABLES_PER_PARTITION * PARTITIONS

    for number in range(most + 5):
        assert life.restore_raw(ref, operator=f"op-{number}").status_code == 200

    assert operators_of(life) == {f"op-{number}" for number in range(most)}


def test_tables_of_any_parallelism_are_bounded(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    """C27: a job with operators of any parallelism has tables up to its share of those of the host."""
    monkeypatch.setattr(materializer, "TABLES_MAX", 20)
    operators = [{"name": f"op-{n}", "parallelism": 128, "key_schema": "{}", "states": {}} for n in range(50)]
    ref = life.complete(0, None, operators=operators)
    for number in range(50):
        life.restore_raw(ref, operator=f"op-{number}")

    assert len(operators_of(life)) == 10


def test_tables_that_nobody_restores_make_room(life: Life, clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables that a host does not run any more, as after a change of parallelism, keep no other ones out."""
    monkeypatch.setattr(materializer, "TABLES_MIN", 3)
    ref = life.complete(0, None, life.append())
    for number in range(100):
        life.restore_raw(ref, operator=f"op-{number}")
    assert "new" not in operators_of(life)

    clock.advance(30 * 24 * 3_600_000)
    assert life.restore_raw(ref, operator="new").status_code == 200

    assert operators_of(life) == {"new"}


def test_each_table_is_not_compared_with_all_others(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    """A14: the first restores of a thousand tables took the square of their number."""
    looks = 0
    is_stale = Schedule.is_stale

    def counted(schedule: Schedule, now_ms: int) -> bool:
        nonlocal looks
        looks += 1
        return is_stale(schedule, now_ms)

    monkeypatch.setattr(Schedule, "is_stale", counted)
    ref = life.complete(0, None, life.append())

    for number in range(50):
        assert life.restore_raw(ref, operator=f"op-{number}").status_code == 200

    assert looks <= 50


def test_counts_of_operators_without_tables_go(life: Life, clock: FakeClock) -> None:
    """C24: restores of any operators leave no counts in the metrics once their tables are dropped."""
    ref = life.complete(0, None, life.append())
    for number in range(5):
        life.restore_raw(ref, operator=f"op-{number}")
    assert counted(life) == {f"op-{number}" for number in range(5)}

    clock.advance(30 * 24 * 3_600_000)
    life.restore_raw(ref)

    assert counted(life) == {"op"}


def counted(life: Life) -> set[str]:
    """Return the operators of which the metrics count something."""
    shown = [name for name in samples(life) if name.startswith("dstl_materializations_skipped_total")]
    return {name.partition('operator="')[2].partition('"')[0] for name in shown}
