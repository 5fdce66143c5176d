"""When a batch has a second pass, and what the pass consists of."""

from __future__ import annotations

from backend_client.batch_time import BatchTime
from backend_client.spark.batch import Receipt
from backend_client.spark.driver.closing import second_pass
from dstl_service.wire import ChangeSetRef

TIME = BatchTime(timestamp_ms=5, watermark_ms=100, previous_watermark_ms=90)


def receipt(operator: str, partition: int, next_due_ms: int | None) -> Receipt:
    """Return the receipt of a partition that has sent one change set."""
    ref = ChangeSetRef(operator, 7, 1, partition, partition, 0, 10, "service")
    return Receipt(operator, partition, partition, 0, 0, 1, [ref], next_due_ms=next_due_ms)


RECEIPTS = [receipt("first", 0, None), receipt("second", 0, 130), receipt("second", 1, 120)]


def test_what_is_due_at_the_new_watermark() -> None:
    """Time advances, rows are late by the batch's watermark, and each partition continues its sequence numbers."""
    found = second_pass(TIME, 120, RECEIPTS)

    assert found is not None
    assert found.time == BatchTime(timestamp_ms=5, watermark_ms=120, previous_watermark_ms=100)
    assert found.due == {"second"}
    assert found.earlier["second"] == {0: RECEIPTS[1].refs, 1: RECEIPTS[2].refs}
    assert Receipt.from_json(RECEIPTS[2].to_json()) == RECEIPTS[2]


def test_no_second_pass() -> None:
    """There is no second pass if nothing is due, the watermark does not move, or the batch is left open."""
    assert second_pass(TIME, 119, RECEIPTS) is None
    assert second_pass(TIME, 100, [receipt("first", 0, 100)]) is None
    assert second_pass(TIME, None, RECEIPTS) is None
    assert second_pass(None, 120, RECEIPTS) is None
