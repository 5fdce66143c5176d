"""The rate of a load over time."""

from __future__ import annotations

import pytest

from loadtest.load.shapes import OUTAGE_S_MAX, SHAPES


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("duration_s", [0.5, 8, 3_600])
def test_rate_is_positive_at_any_time(name: str, duration_s: float) -> None:
    """Every shape has a rate from its beginning to its end, and keeps the last one after that."""
    shape = SHAPES[name](duration_s)
    at_s = [number / 100 * duration_s for number in range(150)]

    assert all(0 < shape.factor_at(time_s) <= 1 for time_s in at_s)
    assert shape.factor_at(duration_s) == shape.factor_at(2 * duration_s) == 1
    assert shape.phase_at(2 * duration_s) == shape.phases[-1]
    assert shape.phases[-1].end_s == duration_s


@pytest.mark.parametrize("name", SHAPES)
def test_due_is_area_below_rate(name: str) -> None:
    """The number due is the rate over all time but outages."""
    shape = SHAPES[name](100.0)
    step_s = 0.01
    times_s = [(number + 0.5) * step_s for number in range(10_000)]
    area = sum(shape.factor_at(at_s) * step_s for at_s in times_s if not shape.phase_at(at_s).is_out)

    assert shape.due_s == pytest.approx(area, rel=1e-3)


def test_ramp_grows_all_the_time() -> None:
    """A ramp begins at a tenth and reaches the rate at its end."""
    shape = SHAPES["ramp"](60.0)

    assert [round(shape.factor_at(at_s), 3) for at_s in (0, 20, 40, 60)] == [0.1, 0.4, 0.7, 1.0]


def test_steps_are_equal() -> None:
    """Five steps of equal length and height."""
    shape = SHAPES["step"](50.0)

    assert [round(shape.factor_at(at_s), 3) for at_s in (0, 9.9, 10, 25, 30, 49)] == [0.2, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert [phase.name for phase in shape.phases][:2] == ["20% of the rate", "40% of the rate"]


@pytest.mark.parametrize(("duration_s", "length_s"), [(10, 2), (100, 20), (3_600, OUTAGE_S_MAX)])
def test_outage_is_in_the_middle(duration_s: int, length_s: float) -> None:
    """The store is out once, for a fifth of the run, and never for longer than clients wait."""
    shape = SHAPES["outage"](duration_s)
    before, outage, _ = shape.phases

    assert [phase.is_out for phase in shape.phases] == [False, True, False]
    assert outage.end_s - before.end_s == pytest.approx(length_s)
    assert shape.phase_at(before.end_s).is_out
    assert not shape.phase_at(outage.end_s).is_out
    assert [name for name in SHAPES if SHAPES[name](duration_s).has_outage] == ["outage"]
