"""The bound on lost rows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from backend_client.failover.losses import LossWindow


def test_bound_holds_at_its_edge() -> None:
    """I17: exactly the allowed share of the window's rows may be lost, its batches and the new one together."""
    window = LossWindow(0.01, window_s=60)
    assert not window.allows(0.0, 0, 1)
    window.add(0.0, 890, 0)

    assert window.allows(1.0, 100, 10)
    assert not window.allows(1.0, 99, 10)
    window.add(1.0, 100, 10)
    assert not window.allows(2.0, 0, 1)
    assert window.allows(2.0, 0, 0)


def test_old_losses_make_room() -> None:
    """Losses count for as long as the window, and so do the rows that allow them."""
    window = LossWindow(0.1, window_s=60)
    window.add(0.0, 50, 50)
    window.add(30.0, 90, 0)

    assert not window.allows(59.0, 90, 20)
    assert window.allows(60.0, 90, 20)
    assert not window.allows(90.0, 90, 20)


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(0, 50), st.integers(0, 5)), max_size=60))
def test_no_window_loses_more(batches: list[tuple[float, int, int]]) -> None:
    """I17: whatever comes, when a batch with losses is accepted, no more than the share of its window is lost."""
    window, taken, now_s = LossWindow(0.05, window_s=60), list[tuple[float, int, int]](), 0.0
    for pause_s, rows, stalled in batches:
        now_s += pause_s
        lost = stalled if window.allows(now_s, rows, stalled) else 0
        run = rows + stalled - lost
        window.add(now_s, run, lost)
        taken.append((now_s, run, lost))
        recent = [batch for batch in taken if batch[0] > now_s - 60]
        if lost:
            assert sum(b[2] for b in recent) <= 0.05 * sum(b[1] + b[2] for b in recent)
