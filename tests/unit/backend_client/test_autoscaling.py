"""When a query's operators get more or fewer partitions."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from backend_client.autoscaling import (
    BACKLOG_BATCHES,
    BUSY_BATCHES,
    CALM_BATCHES,
    CALM_BATCHES_MAX,
    COLD_BATCHES,
    AutoscaleRule,
    Autoscaling,
    backlog_of,
)
from backend_client.settings import BackendSettings
from storage.errors import InvalidInputError

RULE = AutoscaleRule(batch_ms=1000.0, least=1, most=16)


class Stream:
    """A query of one operator whose batches take as long as a function of its partitions says."""

    def __init__(self, batch_ms: Callable[[int], float], partitions: int = 2, rule: AutoscaleRule = RULE) -> None:
        self.batch_ms = batch_ms
        self.partitions = partitions
        self.history = [partitions]
        self.autoscaling = Autoscaling(rule)
        self.backlog = 0.0
        self.run(COLD_BATCHES)

    def run(self, batches: int) -> list[int]:
        """Run batches, changing at once; return the partitions that it has had, from first to last."""
        for _ in range(batches):
            wanted = self.autoscaling.after_batch(
                self.batch_ms(self.partitions), self.backlog, {"one": self.partitions}, is_changing=False
            )
            if wanted:
                self.partitions = wanted["one"]
                self.history.append(self.partitions)
        return self.history


def test_busy_batches_double_the_partitions_until_they_are_fast_enough() -> None:
    """4,000 ms of work on two partitions need eight for batches of a second."""
    stream = Stream(lambda partitions: 8000 / partitions)

    assert stream.run(100) == [2, 4, 8]


def test_first_batches_of_a_start_do_not_count() -> None:
    """They take long whatever the partitions: every restart would double them."""
    autoscaling = Autoscaling(RULE)
    for _ in range(COLD_BATCHES):
        assert autoscaling.after_batch(20_000.0, 0.0, {"one": 2}, is_changing=False) == {}
    for _ in range(CALM_BATCHES - 1):
        assert autoscaling.after_batch(500.0, 0.0, {"one": 2}, is_changing=False) == {}


def test_one_slow_batch_changes_nothing() -> None:
    """Only batches in a row count: a pause of the machine is no lack of partitions."""
    times = iter(([100.0] * 5 + [9000.0] * (BUSY_BATCHES - 1) + [500.0]) * 20)
    stream = Stream(lambda _: next(times))

    assert stream.run(100) == [2]


def test_backlog_is_a_lack_of_partitions() -> None:
    """Batches of a bounded size are short, but the sources hold more and more back."""
    stream = Stream(lambda partitions: 800 / partitions)
    stream.backlog = BACKLOG_BATCHES + 1

    assert stream.run(BUSY_BATCHES) == [2, 4]


def test_calm_batches_halve_the_partitions_down_to_the_least() -> None:
    """At night the partitions become fewer, and never so few that batches would be slow."""
    assert Stream(lambda _: 10.0, 16).run(10 * CALM_BATCHES) == [16, 8, 4, 2, 1]
    assert Stream(lambda partitions: 1600 / partitions, 16).run(10 * CALM_BATCHES) == [16, 8, 4]


def test_backlog_keeps_partitions() -> None:
    """Short batches are no sign of calm while the sources hold rows back."""
    stream = Stream(lambda _: 10.0, 16)
    stream.backlog = 2.0

    assert stream.run(10 * CALM_BATCHES) == [16]


def test_partitions_that_do_not_help_are_not_added() -> None:
    """A sink, or a single hot key, that takes the time is not made faster: one try, and no more until it gets worse."""
    stream = Stream(lambda _: 5000.0)
    assert stream.run(100) == [2, 4]

    stream.batch_ms = lambda partitions: 40_000 / partitions
    assert stream.run(100) == [2, 4, 8, 16]


def test_bounds_hold() -> None:
    """Neither more nor fewer partitions than allowed, also where the present number is outside."""
    rule = AutoscaleRule(batch_ms=1000.0, least=4, most=6)

    assert Stream(lambda _: 10.0, 8, rule).run(10 * CALM_BATCHES) == [8, 4]
    assert Stream(lambda partitions: 80_000 / partitions, 4, rule).run(100) == [4, 6]
    assert Stream(lambda partitions: 80_000 / partitions, 12, rule).run(100) == [12]
    assert Stream(lambda _: 10.0, 2, rule).run(10 * CALM_BATCHES) == [2]


def test_number_beyond_the_bounds_is_no_change(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is said of partitions that were not added: only the program gives an operator more than the most."""
    Stream(lambda _: 5000.0, 32).run(100)
    Stream(lambda _: 5000.0, 16).run(100)

    assert caplog.messages == []


def test_swinging_load_swings_ever_more_slowly() -> None:
    """Each rise after a fall doubles the calm batches that the next fall needs."""
    stream, swings = Stream(lambda partitions: 10.0, 4), 0
    for _ in range(CALM_BATCHES_MAX * 20 // (CALM_BATCHES + 10)):
        stream.batch_ms = lambda _: 10.0
        stream.run(CALM_BATCHES + 5)
        stream.batch_ms = lambda partitions: 8000 / partitions
        stream.run(10)
    swings = sum(later < earlier for earlier, later in zip(stream.history, stream.history[1:], strict=False))

    assert stream.partitions == 8
    assert swings < 5


def test_a_change_under_way_says_nothing_about_the_partitions() -> None:
    """Batches beside a preparation, and the one that switches, are not counted."""
    autoscaling = Autoscaling(RULE)
    for _ in range(100):
        assert autoscaling.after_batch(9000.0, 0.0, {"one": 2}, is_changing=True) == {}

    answers = [
        autoscaling.after_batch(9000.0, 0.0, {"one": 2, "two": 16}, is_changing=False) for _ in range(BUSY_BATCHES)
    ]
    assert answers == [*[{}] * (BUSY_BATCHES - 1), {"one": 4}]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ({"endOffset": {"t": {"0": 10, "1": 5}}, "latestOffset": {"t": {"0": 30, "1": 15}}, "numInputRows": 10}, 3.0),
        ({"endOffset": '{"t":{"0":10}}', "latestOffset": '{"t":{"0":10}}', "numInputRows": 0}, 0.0),
        ({"endOffset": {"t": {"0": 10}}, "latestOffset": {"t": {"0": 12}}, "numInputRows": 0}, 2.0),
        ({"endOffset": {"logOffset": 3}, "latestOffset": None, "numInputRows": 7}, 0.0),
        ({"endOffset": 12, "latestOffset": 40, "numInputRows": 7}, 0.0),
        ({"endOffset": "not JSON", "latestOffset": {}, "numInputRows": 7}, 0.0),
        ({}, 0.0),
    ],
)
def test_backlog_is_what_offsets_by_partition_say(source: dict[str, Any], expected: float) -> None:
    """Kafka's offsets count rows; a file source's, a rate's and unknown ones do not."""
    assert backlog_of([source]) == expected
    assert backlog_of([json.loads(json.dumps(source)), {}]) == expected


def test_no_source_has_no_backlog() -> None:
    """A progress may list none."""
    assert backlog_of([]) == 0.0


def test_settings_make_the_rule() -> None:
    """Without a duration there is no rule; the most is Spark's cores, within the key groups, and at least the least."""

    def rule(**options: Any) -> AutoscaleRule | None:
        return AutoscaleRule.of(BackendSettings("file:///s", "job", **options), 8, 128)

    assert rule() is None
    assert rule(autoscale_batch_ms=500) == AutoscaleRule(500, 1, 8)
    assert rule(autoscale_batch_ms=500, autoscale_max=1000) == AutoscaleRule(500, 1, 128)
    assert rule(autoscale_batch_ms=500, autoscale_min=12) == AutoscaleRule(500, 12, 12)
    assert rule(autoscale_batch_ms=500, autoscale_min=300) == AutoscaleRule(500, 128, 128)


def test_restart_goes_on_with_the_last_number() -> None:
    """The rule's findings are kept over a restart; bounds that were changed meanwhile hold."""
    assert RULE.start(None, 3) == 3
    assert RULE.start(8, 3) == 8
    assert RULE.start(64, 3) == 16


@pytest.mark.parametrize(
    "options",
    [
        {"autoscale_batch_ms": 0},
        {"autoscale_batch_ms": "fast"},
        {"autoscale_min": 0},
        {"autoscale_min": 1.5},
        {"autoscale_min": 5, "autoscale_max": 4},
        {"autoscale_max": 40_000},
    ],
)
def test_settings_that_make_no_rule_are_refused(options: dict[str, Any]) -> None:
    """The error names the setting."""
    with pytest.raises(InvalidInputError, match=r"autoscale_(batch_ms|min|max) must be"):
        BackendSettings("file:///s", "job", **options)
