"""Garbage collection in a worker."""

from __future__ import annotations

import gc
from collections.abc import Generator, Iterator

import pytest

from backend_client.spark.task.worker import rare_garbage_collection


@pytest.fixture(autouse=True)
def _threshold() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


@pytest.mark.parametrize(("given", "within"), [((700, 10, 10), 10_000), ((50_000, 5, 5), 50_000), ((0, 10, 10), 0)])
def test_collections_are_rarer_within(given: tuple[int, int, int], within: int) -> None:
    """During a task, garbage is collected more rarely, never more often; disabled collection stays disabled."""
    gc.set_threshold(*given)
    with rare_garbage_collection():
        assert gc.get_threshold() == (within, *given[1:])

    assert gc.get_threshold() == given


def test_ended_task_leaves_no_trace() -> None:
    """After a task, even one not read to its end, the worker collects as before."""

    def outputs() -> Generator[int, None, None]:
        with rare_garbage_collection():
            yield from range(2)

    given = 700, 10, 10
    gc.set_threshold(*given)
    task = outputs()
    next(task)
    assert gc.get_threshold() != given
    task.close()

    assert gc.get_threshold() == given
