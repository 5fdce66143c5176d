"""A store's draws, against its profile."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loadtest.load.result.store_figures import store_figures
from tools.reporting.figures import strict_exit_code
from tools.servers.faults.store_model import Drawn, StoreModel
from tools.servers.faults.store_profiles import PROFILES

SIZES = {"small": 1_000, "large": 100_000}


def drawn_at(profile: str, requests: int, seed: int = 0) -> Drawn:
    """Return what a store of this profile draws for requests of both sizes."""
    model = StoreModel(PROFILES[profile], seed)
    for at_s in range(requests):
        for size in SIZES.values():
            model.answer_due_s(model.fate(0.0), "a", float(at_s), float(at_s), size, 0)
    return model.drawn()


@pytest.mark.parametrize("profile", [name for name, profile in PROFILES.items() if profile.lines])
@pytest.mark.parametrize("requests", [10, 300, 20_000])
def test_draws_follow_profile(profile: str, requests: int) -> None:
    """Every profile's draws are as it wants, for few requests as for many."""
    for seed in range(3):
        assert strict_exit_code(store_figures(PROFILES[profile], drawn_at(profile, requests, seed))) == 0


@pytest.mark.parametrize("factor", [0.8, 1.25])
def test_other_latencies_are_found(factor: float) -> None:
    """Latencies a quarter longer or shorter than the profile's miss the goal."""
    drawn = drawn_at("s3-standard", 2_000)
    wrong = {name: [value * factor for value in values] for name, values in drawn.latencies_ms.items()}

    assert strict_exit_code(store_figures(PROFILES["s3-standard"], replace(drawn, latencies_ms=wrong))) == 1


@pytest.mark.parametrize("change", [{"refused": 0}, {"refused": 200}, {"reset": 0}, {"reset": 100}])
def test_other_shares_are_found(change: dict[str, int]) -> None:
    """503s and resets that are fewer or more than the profile's miss the goal."""
    drawn = replace(drawn_at("lossy", 5_000), **change)  # type: ignore[arg-type]  # numbers only

    assert strict_exit_code(store_figures(PROFILES["lossy"], drawn)) == 1


def test_percentiles_are_reported_side_by_side() -> None:
    """Each percentile is reported as drawn, wanted and answered."""
    figures = store_figures(PROFILES["s3-standard"], drawn_at("s3-standard", 20_000))
    values = {figure.name: figure.value for figure in figures}

    assert values["store, large: p99.9 wanted"] == 3_202
    assert values["store, large: p99 drawn"] == pytest.approx(1_039, rel=0.05)
    assert values["store, large: p99 answered"] == pytest.approx(values["store, large: p99 drawn"])
    assert values["store, small: requests"] == 20_000


def test_assumed_percentiles_are_named() -> None:
    """Unpublished figures are reported as assumed: latencies of S3 up to 64 KB, and no measured one."""
    names = {figure.name for figure in store_figures(PROFILES["s3-standard"], Drawn())}

    assert {"store, small: p50 wanted, assumed", "store, large: p50 wanted"} <= names
    assert "store: bandwidth of a host, assumed" in names


def test_store_as_it_is_has_no_goal() -> None:
    """A store that adds nothing has nothing to compare."""
    assert [figure.goal for figure in store_figures(PROFILES["local"], Drawn(requests=5))] == [None, None]


def test_unused_line_has_no_goal() -> None:
    """A run without large objects has nothing to compare for them."""
    figures = store_figures(PROFILES["same-zone"], Drawn(latencies_ms={"small": [15.0], "large": []}))

    assert not [figure for figure in figures if "large" in figure.name and figure.goal is not None]
