"""Tests of `backend_client.spark.output.tasks`: what a task that publishes answers instead of failing."""

from __future__ import annotations

import pickle

import pyarrow as pa
import pytest

from backend_client.settings import BackendSettings
from backend_client.sinks.slot_publishing import Target
from backend_client.spark.output import tasks
from backend_client.spark.output.tasks import PublishTask
from backend_client.spark.shipping import Parcel
from dstl_service.wire import CheckpointRef
from storage.errors import DstlError, NotFoundError, UnavailableError

COLUMNS = pa.schema({"value": pa.string()})


@pytest.mark.parametrize(
    "error", [UnavailableError("the broker is away"), NotFoundError("checkpoint 3 is no longer stored")]
)
def test_what_passes_by_itself_is_answered(monkeypatch: pytest.MonkeyPatch, error: DstlError) -> None:
    """A system that is away, and a log that went on meanwhile, fail no task, which Spark would repeat at once."""

    def refuse(*_: object) -> int:
        raise error

    monkeypatch.setattr(tasks, "publish_slot", refuse)
    target = Target(CheckpointRef(3, 0, "uid"))
    task = PublishTask(
        BackendSettings("s3://bucket/jobs", "job"), "uid", "out", Parcel(pickle.dumps(None)), target, COLUMNS
    )

    answers = list(task([pa.RecordBatch.from_pydict({"slot": [0, 1]})]))

    assert [answer.to_pylist() for answer in answers] == [[{"refusal": str(error)}]] * 2
