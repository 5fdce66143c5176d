"""When an upload gets an early second attempt."""

from __future__ import annotations

import pytest

from dstl_service.uploads.hedging import BURST, DELAY_MS_MIN, SAMPLES, SAMPLES_MIN, Hedging, size_class


def hedging_after(durations_ms: list[float], size_bytes: int = 1000, share_max: float = 0.12) -> Hedging:
    """Return hedging that has seen attempts of one size."""
    hedging = Hedging(share_max)
    for duration_ms in durations_ms:
        hedging.attempt_ended(size_bytes, duration_ms)
    return hedging


@pytest.mark.parametrize(
    ("size_bytes", "number"),
    [(0, 0), (1, 0), (1 << 16, 0), ((1 << 16) + 1, 1), (1 << 20, 1), ((1 << 20) + 1, 2), (10_000_000, 2)],
)
def test_sizes_have_classes(size_bytes: int, number: int) -> None:
    """Objects of up to 64 KiB are one class, and each factor of 16 is the next."""
    assert size_class(size_bytes) == number


def test_delay_is_the_running_quantile() -> None:
    """The delay is what nine in ten of the newest attempts did not exceed; older ones are forgotten."""
    hedging = hedging_after([5_000.0] * SAMPLES)
    assert hedging.delay_ms(1000) == 5_000
    for duration_ms in range(SAMPLES):
        hedging.attempt_ended(1000, 1_000.0 + duration_ms)

    assert hedging.delay_ms(1000) == 1_000 + int(0.9 * SAMPLES)


def test_few_attempts_say_nothing() -> None:
    """Before enough attempts of a class were measured, none is early; other classes do not count."""
    hedging = hedging_after([100.0] * (SAMPLES_MIN - 1))
    assert hedging.delay_ms(1000) is None
    hedging.attempt_ended(1000, 100.0)

    assert hedging.delay_ms(1000) == 100
    assert hedging.delay_ms(1 << 20) is None


def test_quick_store_is_not_hedged_early() -> None:
    """A store that answers within a millisecond gets no second attempt after a millisecond."""
    assert hedging_after([1.0] * SAMPLES).delay_ms(1000) == DELAY_MS_MIN


def test_share_bounds_early_attempts() -> None:
    """Early attempts stay below their share of the uploads, and after a long calm below the burst."""
    hedging = Hedging(0.1)
    taken = 0
    for _ in range(1_000):
        hedging.upload_begins()
        taken += hedging.take()
    assert taken == pytest.approx(101, abs=1)

    for _ in range(10_000):
        hedging.upload_begins()
    assert sum(hedging.take() for _ in range(100)) == int(BURST)


def test_none_with_a_share_of_zero() -> None:
    """With 0 no attempt is early."""
    hedging = hedging_after([100.0] * SAMPLES, share_max=0)
    hedging.upload_begins()

    assert hedging.delay_ms(1000) is None
    assert not hedging.take()
