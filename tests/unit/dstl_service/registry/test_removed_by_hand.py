"""
A job whose objects were removed by hand, as who wants to start over does, while sidecars that know it run on.

There is no tombstone, and epochs count from 1 again: what a process remembers of the former job fences no new one.
"""

from __future__ import annotations

from typing import Any

import pytest

from storage.memory_store import MemoryStore
from tests.unit.dstl_service.http_life import Life, service


def run_twice(coordinator: Life) -> dict[str, Any]:
    """Leave a job with two epochs and a checkpoint, and return that."""
    coordinator.open()
    coordinator.open()
    return coordinator.complete(0, None, coordinator.append(b"former"), uid="former")


def remove(store: MemoryStore) -> None:
    """Delete all objects."""
    store.delete([info.key for info in store.list("")])


def test_job_starts_over() -> None:
    """The coordinator opens it with its first epoch, and holds nothing of the former one."""
    store = MemoryStore()
    with service(store) as coordinator:
        run_twice(coordinator)
        former = coordinator.open()
        remove(store)

        opened = coordinator.open()

        assert (opened["epoch"], opened["latest"]) == (1, None)
        assert opened["job_uid"] != former["job_uid"]
        made = coordinator.complete(0, None, coordinator.append(b"new"), uid="new")
        assert coordinator.restore(made) == (True, [b"new"])
        assert coordinator.open()["epoch"] == 2


def test_coordinator_of_a_removed_job_refuses_it() -> None:
    """Its driver, which runs on, gets an error instead of a checkpoint without what came before."""
    store = MemoryStore()
    with service(store) as coordinator:
        run_twice(coordinator)
        remove(store)

        answer = coordinator.complete_raw(1, None, coordinator.append(b"more", checkpoint_id=1), uid="more")

        assert answer.status_code == 409, answer.text


@pytest.mark.parametrize("has_restored", [False, True])
def test_other_sidecars_take_the_new_job(*, has_restored: bool) -> None:
    """A sidecar that knows a newer epoch of the former job takes sets of the new one, and restores it."""
    store = MemoryStore()
    with service(store) as coordinator, service(store) as sidecar:
        former = run_twice(coordinator)
        sidecar.epoch = coordinator.epoch
        sidecar.append(b"former", checkpoint_id=1)
        if has_restored:
            assert sidecar.restore(former) == (True, [b"former"])
        remove(store)

        job_uid = coordinator.open()["job_uid"]
        sidecar.epoch = coordinator.epoch
        taken = sidecar.append(b"new", job_uid=job_uid)
        (handle,) = sidecar.persist(taken).json()["handles"]
        made = coordinator.complete(0, None, {**taken, "handle": handle}, uid="new")

        assert sidecar.restore(made) == (True, [b"new"])


def test_other_sidecars_restore_the_new_job_first() -> None:
    """A sidecar that has restored the former job, and takes no sets of the new one before it restores that."""
    store = MemoryStore()
    with service(store) as coordinator, service(store) as sidecar:
        assert sidecar.restore(run_twice(coordinator)) == (True, [b"former"])
        remove(store)
        coordinator.open()
        made = coordinator.complete(0, None, coordinator.append(b"new"), uid="new")

        assert sidecar.restore(made) == (True, [b"new"])
