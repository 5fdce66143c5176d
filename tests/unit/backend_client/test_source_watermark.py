"""How stateful operators of the input change a watermark."""

from __future__ import annotations

from backend_client.batch_time import BatchTime
from backend_client.source_watermark import PlanNode, output_time

GIVES = PlanNode(gives=True)


def join(*inputs: PlanNode, keeps_back_ms: int) -> PlanNode:
    """Return a join whose output watermark is before its input's."""
    return PlanNode(inputs, lets_out=lambda ms: ms - keeps_back_ms)


def test_least_watermark_counts() -> None:
    """The slowest input of a union counts; an input without a watermark does not."""
    tree = PlanNode((GIVES, join(GIVES, GIVES, keeps_back_ms=30), PlanNode()))

    assert tree.is_stateful
    assert tree.output_ms(1000) == 970


def test_operators_in_a_row() -> None:
    """Each operator's output is the next one's input."""
    tree = join(join(GIVES, keeps_back_ms=30), keeps_back_ms=5)

    assert tree.output_ms(1000) == 965
    assert tree.input_ms(1000) == 970


def test_inputs_without_state() -> None:
    """Inputs without state have the query's watermark."""
    assert not PlanNode((GIVES, PlanNode())).is_stateful
    assert PlanNode((GIVES, PlanNode())).output_ms(7) == 7
    assert PlanNode().output_ms(7) is None


def test_operator_without_an_output_watermark() -> None:
    """An operator without an output watermark ends it."""
    assert PlanNode((GIVES,), lets_out=lambda ms: None).output_ms(7) is None


def test_time_after_stateful_inputs() -> None:
    """Both watermarks of a batch are propagated through the input; none is before 1970, which means there is none."""
    time = BatchTime(timestamp_ms=5, watermark_ms=100, previous_watermark_ms=20)

    assert output_time(join(GIVES, keeps_back_ms=30), time) == BatchTime(5, 70, 0)


def test_operators_that_ask_for_a_batch_without_data() -> None:
    """Each operator is asked with the watermark at its own input; one that needs a batch is enough."""
    first = PlanNode((GIVES,), lets_out=lambda ms: ms - 30, asks=lambda ms: ms > 200)
    second = PlanNode((first,), lets_out=lambda ms: ms, asks=lambda ms: ms > 100)

    assert [second.asks_at(moment) for moment in (130, 131, 201)] == [False, True, True]
    assert [first.asks_at(moment) for moment in (200, 201)] == [False, True]
    assert not join(GIVES, keeps_back_ms=0).asks_at(10_000)
