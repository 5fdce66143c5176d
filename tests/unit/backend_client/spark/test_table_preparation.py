"""The jobs that prepare tables beside the batches; Spark's part is played."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from backend_client.settings import BackendSettings
from backend_client.spark.places.table_preparation import TablePreparer
from dstl_service.wire import CheckpointRef

WAIT_S, TASK_S = 0.3, 0.05


class Spark:
    """A session with eight cores, places, and the frames there: a job waits for a core, and then works."""

    def __init__(self) -> None:
        self.sparkContext = SimpleNamespace(defaultParallelism=8)
        self.conf: dict[str, str] = {}
        self.jobs: list[list[int]] = []

    def newSession(self) -> Any:
        """Return a session of the backend's own."""
        return SimpleNamespace(sparkContext=self.sparkContext, conf=SimpleNamespace(set=self.conf.__setitem__))

    def frame_of(self, partitions: Sequence[int], _: int, __: Any) -> Any:
        """Return a frame of these partitions."""
        self.jobs.append(list(partitions))
        rows = [SimpleNamespace(seconds=TASK_S / (at + 1)) for at in range(len(partitions))]

        def collect() -> list[Any]:
            time.sleep(WAIT_S)
            return rows

        return SimpleNamespace(mapInArrow=lambda *_: SimpleNamespace(collect=collect))


def preparer(spark: Any, base: CheckpointRef | None) -> TablePreparer:
    """Return that of a job with this newest checkpoint."""
    session: Any = SimpleNamespace(base=base, job_uid="uid", max_parallelism=16)
    return TablePreparer(spark, session, BackendSettings("file:///tmp/s", "job"), spark)


def test_a_wait_for_cores_is_no_work() -> None:
    """A quarter of the cores prepares tables, and says for how long: batches that leave none free cost no pause."""
    spark = Spark()
    seconds = [*preparer(spark, CheckpointRef(7, 0, "u"))("op", 3)]

    assert spark.jobs == [[0, 1], [2]]
    assert all(TASK_S <= one < WAIT_S for one in seconds)


def test_partitions_are_told_as_they_are_prepared() -> None:
    """Each job's partitions are told when it is done; without a checkpoint there is nothing to prepare."""
    spark = Spark()
    assert [*preparer(spark, CheckpointRef(7, 0, "u")).prepare("op", 8, [1, 4, 5])] == [[1, 4], [5]]
    assert spark.jobs == [[1, 4], [5]]
    assert [*preparer(spark, None)("op", 3)] == []
