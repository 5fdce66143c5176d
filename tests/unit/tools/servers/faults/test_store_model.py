"""The drawn fates of requests to a store."""

from __future__ import annotations

from collections import Counter

import pytest

from tools.servers.faults.store_model import KEPT_DRAWS, Drawn, Fate, StoreModel
from tools.servers.faults.store_profiles import PROFILES, SMALL_BYTES_MAX, Latency, StoreProfile

LINE = Latency({50: 100, 99: 200})
MEDIAN = Fate("answer", 0.5)


def answered_s(model: StoreModel, sent: int = 0, received: int = 0, *, host: str = "a", began_s: float = 10.0) -> float:
    """Return how long after its arrival a request of median latency is answered."""
    return model.answer_due_s(MEDIAN, host, began_s, began_s, sent, received) - began_s


def test_fates_follow_from_seed() -> None:
    """The same seed gives the same fates in the same order; another seed gives others."""
    first, again, other = (StoreModel(PROFILES["lossy"], seed) for seed in (1, 1, 2))
    fates = [first.fate(0.0) for _ in range(50)]

    assert fates == [again.fate(0.0) for _ in range(50)]
    assert fates != [other.fate(0.0) for _ in range(50)]


def test_shares_are_those_of_profile() -> None:
    """1 % of many requests are refused and 0.5 % reset, half of these after the store has acted."""
    model = StoreModel(PROFILES["lossy"], 3)
    counts = Counter(model.fate(0.0).outcome for _ in range(100_000))

    assert counts["refuse"] == pytest.approx(1_000, rel=0.15)
    assert counts["drop"] == pytest.approx(250, rel=0.3)
    assert counts["lose_response"] == pytest.approx(250, rel=0.3)
    drawn = model.drawn()
    assert (drawn.requests, drawn.refused) == (100_000, counts["refuse"])
    assert drawn.reset == counts["drop"] + counts["lose_response"]


@pytest.mark.parametrize(
    ("sent", "received", "expected_s"),
    [(0, 0, 0.01), (SMALL_BYTES_MAX, SMALL_BYTES_MAX, 0.01), (SMALL_BYTES_MAX + 1, 0, 0.1), (0, 100_000, 0.1)],
)
def test_larger_body_decides_line(sent: int, received: int, expected_s: float) -> None:
    """Up to 64 KB either way, a request has the latency of small ones; above, that of large ones."""
    model = StoreModel(StoreProfile(small=Latency({50: 10, 99: 20}), large=LINE), 0)

    assert answered_s(model, sent, received) == pytest.approx(expected_s)
    assert {name: len(values) for name, values in model.drawn().latencies_ms.items()} == (
        {"small": 1, "large": 0} if expected_s == 0.01 else {"small": 0, "large": 1}
    )


def test_requests_of_one_host_share_its_bandwidth() -> None:
    """Bytes of a host pass one after the other, each way by itself; those of another host do not wait."""
    model = StoreModel(StoreProfile(large=LINE, bandwidth_bytes_per_s=1e6), 0)

    assert answered_s(model, 1_000_000) == pytest.approx(1.0)
    assert answered_s(model, 1_000_000) == pytest.approx(2.0)
    assert answered_s(model, 0, 1_000_000) == pytest.approx(1.0)
    assert answered_s(model, 1_000_000, host="b") == pytest.approx(1.0)
    assert answered_s(model, 70_000, began_s=20.0) == pytest.approx(0.1)  # the link is free, the latency longer
    assert model.drawn().answered_ms["large"] == pytest.approx([1_000, 2_000, 1_000, 1_000, 100])
    assert model.drawn().late == 0


def test_late_answer_is_counted() -> None:
    """A store that takes longer than drawn is not waited for, and counted."""
    model = StoreModel(StoreProfile(small=LINE), 0)

    assert model.answer_due_s(MEDIAN, "a", 10.0, 10.05, 0, 0) == pytest.approx(10.1)
    assert model.answer_due_s(MEDIAN, "a", 10.0, 10.3, 0, 0) == pytest.approx(10.1)
    assert model.drawn().late == 1
    assert model.drawn().latencies_ms["small"] == pytest.approx([100.0, 100.0])
    assert model.drawn().answered_ms["small"] == pytest.approx([100.0, 300.0])


def test_outages_come_at_end_of_periods() -> None:
    """Each period ends with an outage, counted from the first request; requests within it draw nothing."""
    model = StoreModel(StoreProfile(outage_every_s=30.0, outage_s=5.0), 0)
    outcomes = [model.fate(1_000.0 + second).outcome for second in range(90)]

    assert [second for second, outcome in enumerate(outcomes) if outcome == "out"] == [
        *range(25, 30),
        *range(55, 60),
        *range(85, 90),
    ]
    assert (model.drawn().out, model.drawn().requests) == (15, 75)


def test_outage_can_be_begun() -> None:
    """An outage that somebody begins lasts until it is ended."""
    model = StoreModel(PROFILES["local"], 0)
    model.is_out = True
    assert model.fate(0.0).outcome == "out"
    model.is_out = False
    assert model.fate(0.0).outcome == "answer"


def test_store_as_it_is_adds_nothing() -> None:
    """Without latency and bandwidth, every answer is due at once and nothing is drawn."""
    model = StoreModel(PROFILES["local"], 0)

    assert answered_s(model, 10_000_000, 10_000_000) == 0
    assert model.drawn() == Drawn()


def test_newest_draws_are_kept() -> None:
    """A long run keeps a bounded number of draws, and its counts."""
    model = StoreModel(StoreProfile(small=LINE), 0)
    for _ in range(KEPT_DRAWS + 10):
        answered_s(model)

    assert len(model.drawn().latencies_ms["small"]) == KEPT_DRAWS


def test_what_was_drawn_survives_json() -> None:
    """The draws are the same after they went to another process."""
    model = StoreModel(PROFILES["lossy"], 0)
    for _ in range(5):
        answered_s(model)

    assert Drawn.from_dict(model.drawn().to_dict()) == model.drawn()
