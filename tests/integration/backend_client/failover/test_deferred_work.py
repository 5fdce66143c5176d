"""The work of a task that runs what waited, with a real table and a real service, without Spark."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.serializers import CloudPickleSerializer
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.types import StructType

from backend_client.batch_time import BatchTime, TimeMode
from backend_client.failover.patience import TaskFailover
from backend_client.failover.set_aside_entries import companion_info
from backend_client.failover.set_aside_log import log_rows
from backend_client.key_group_sql import HASH_BITS
from backend_client.service.client import ServiceClient
from backend_client.service.log_writer import LogWriter
from backend_client.service.restore import advance_to_base
from backend_client.settings import BackendSettings
from backend_client.spark.batch import BatchContext
from backend_client.spark.shipping import Parcel
from backend_client.spark.task import task as task_module
from backend_client.spark.task.rows import RowsToArrow
from backend_client.spark.task.task import OperatorTask, Partition
from backend_client.state.codec import KeyCodec, ValueCodec
from backend_client.state.keyed_collections import ListVariable
from backend_client.state.keyed_state import KeyedState
from backend_client.state.timers import Timers
from backend_client.table.state_table import StateTable
from dstl_service.wire import OperatorInfo, RowsSetAside, StateInfo
from storage.key_groups import KeyGroupRange
from tools.servers.service.job_driver import ALL_KEY_GROUPS, JobDriver
from tools.servers.service.process import ServiceProcess

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

SCHEMA = StructType().add("v", "string")
KEY = StructType().add("k", "string").json()
SEEN = StateInfo(0, "list", SCHEMA.json())
ANN = KeyCodec(KEY).encode(("ann",))
LEFT = KeyGroupRange(0, 63)


class FiredAt(StatefulProcessor):
    """Appends the watermark to a key's list when a timer fires, and yields the list."""

    def init(self, handle: Any) -> None:
        """Get the list."""
        self._seen = handle.getListState("seen", SCHEMA)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        """Yield the keys."""
        return (Row(v=row.k) for row in list(rows))

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        """Append, and yield all."""
        self._seen.appendValue((str(timerValues.getCurrentWatermarkInMs()),))
        return (Row(v=seen) for (seen,) in list(self._seen.get()))

    def close(self) -> None:
        """Do nothing."""


@pytest.fixture
def client(tmp_path: Path) -> Iterator[ServiceClient]:
    """Return the client of a service."""
    with ServiceProcess(f"file://{tmp_path / 'store'}", {}) as running:
        client = ServiceClient(running.address, patience_s=30)
        yield client
        client.close()


def test_time_passes_only_where_it_has_not(
    client: ServiceClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I14: at another parallelism, what waits runs in its own key groups; in the others no time passes again."""
    job = JobDriver(client)
    job.complete([])
    state = KeyedState(lambda _: None, ALL_KEY_GROUPS, lambda _: iter(()), checkpoint_id=1)
    state.key_group, state.key = 100, ANN  # of another partition than the stalled one: its rows ran in batch 1
    ListVariable(state, SEEN.id, ValueCodec(SEEN.schema, "seen")).appendValue(("in batch 1",))
    Timers(state, until_ms=0).register(35)  # set when it was due already: it is left to the next batch
    target = replace(job.target(partition=1, key_groups=LEFT), operator="op.set-aside")
    writer = LogWriter(client, target)
    waits = pa.record_batch({"order": pa.array([(5 << HASH_BITS) + 1], pa.int64()), "k": ["bob"]})
    log_rows([waits], LEFT, job.epoch, writer, 1000)
    stalled = RowsSetAside(1, LEFT.first, LEFT.last, 1, 70, 500, 40, 30, closed_ms=50)
    info = OperatorInfo("op", 2, KEY, {"seen": SEEN}, kind="rows")
    operators = [info, companion_info(info, "struct<k:string>", (stalled,))]
    job.complete([*job.write(state.take_changes()), *writer.refs], operators=operators)
    job.complete([], operators=operators)
    assert job.base is not None

    monkeypatch.setattr(task_module, "kept_client", lambda _: client)
    settings = BackendSettings(f"file://{tmp_path / 'store'}", "job", local_dir=str(tmp_path / "local"))
    context = BatchContext(settings, "uid", job.epoch, 3, job.base, "", time=BatchTime(900, 60, 50))
    task = OperatorTask(
        operator="op",
        processor=Parcel(CloudPickleSerializer().dumps(FiredAt())),  # type: ignore[no-untyped-call]
        states={"seen": SEEN},
        key_schema=KEY,
        key_places=(0,),
        row_names=("k",),
        output=SCHEMA,
        parallelism=1,
        max_parallelism=128,
        batch=context,
        time_mode=TimeMode.EVENT,
        failover=TaskFailover("op.set-aside", waiting={0: (stalled,)}),
    )
    table = StateTable.open(tmp_path / "table")
    advance_to_base(table, client, "job", "op", ALL_KEY_GROUPS, job.base)
    part = Partition(0, 1, ALL_KEY_GROUPS, table, LogWriter(client, job.target()), None, None)
    works = task.works(part, (), RowsToArrow(SCHEMA))
    output = [columns[0].to_pylist() for work in works for columns in work.outputs]
    table.close()

    assert output == [["bob"], ["in batch 1", "60"]]
