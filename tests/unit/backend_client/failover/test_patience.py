"""How long a task waits for its table, and whether its rows may be set aside."""

from __future__ import annotations

import pytest

from backend_client.failover.patience import PartitionState, Patience, patience

SOON, NOW = Patience(1.0, sets_aside=True), Patience(0.0, sets_aside=True)
IF_WITHOUT_ROWS = Patience(1.0, sets_aside=False)


@pytest.mark.parametrize(
    ("state", "deferred", "exact"),
    [
        (PartitionState(), SOON, None),
        (PartitionState(is_idle=True), SOON, IF_WITHOUT_ROWS),
        (PartitionState(is_restoring=True), NOW, None),
        (PartitionState(is_restoring=True, is_idle=True), NOW, Patience(0.0, sets_aside=False)),
        (PartitionState(has_waiting=True, is_idle=True), SOON, None),
        (PartitionState(has_waiting=True, is_restoring=True, stalled_s=29.9), NOW, None),
        (PartitionState(has_waiting=True, is_restoring=True, stalled_s=30), None, None),
        (PartitionState(is_idle=True, stalled_s=30), IF_WITHOUT_ROWS, IF_WITHOUT_ROWS),
    ],
)
def test_patience_of_partition(state: PartitionState, deferred: Patience | None, exact: Patience | None) -> None:
    """An exact batch leaves no waiting rows behind, nor does one after the longest stall."""
    assert patience(state, 1.0, 30.0, is_exact=False) == deferred
    assert patience(state, 1.0, 30.0, is_exact=True) == exact
