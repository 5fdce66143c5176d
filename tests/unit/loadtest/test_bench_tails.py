"""`make bench-tails`, with few persists: the tail shrinks, and the extra PUTs stay within their share."""

from __future__ import annotations

from loadtest.bench_tails import RULES, measure


def test_second_attempts_shorten_the_tail() -> None:
    """Each rule has its figures; with early attempts the slowest persists are quicker than with one attempt."""
    found = {figure.name: figure for figure in measure(short=True)}

    assert len(found) == 2 * len(RULES) * 4
    hedged, alone = (found[f"persist p99.9, small, {rule}"].value for rule in ("running p90", "one attempt"))
    assert hedged is not None
    assert alone is not None
    assert hedged < alone / 2
    for line in ("small", "large"):
        extra = found[f"PUTs more than persists, {line}, running p90"].value
        assert extra is not None
        assert 0 < extra <= 0.14
        assert found[f"PUTs more than persists, {line}, one attempt"].value == 0
