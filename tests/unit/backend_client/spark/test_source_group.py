"""When a query's offsets are committed to a consumer group, and which options say so."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from pyspark.sql import DataFrame

from backend_client.sources.background_commits import BackgroundCommits
from backend_client.sources.kafka_positions import Cluster, Positions
from backend_client.spark.output.outputs import FunctionOutput, FunctionPlan, LostOutputError
from backend_client.spark.output.source_group import GroupOutput, with_group
from dstl_service.wire import CheckpointRef
from storage.errors import InvalidInputError

PLAN = FunctionPlan(lambda _batch, _id: None)
NO_FRAME = cast("DataFrame", None)


def checkpoint(checkpoint_id: int) -> Any:
    ref = CheckpointRef(checkpoint_id, 0, f"m{checkpoint_id}")
    return SimpleNamespace(ref=ref, offsets=f'v1\n{{}}\n{{"in":{{"0":{checkpoint_id * 10}}}}}')


def failing(_batch: DataFrame, _id: int) -> None:
    raise RuntimeError("the function fails")


def test_offsets_are_those_of_checkpoints() -> None:
    """At the start those of the stored state, so also after a rewind; then behind each checkpoint, whatever fails."""
    seen: list[tuple[Positions, int]] = []
    session = SimpleNamespace(latest=checkpoint(4))
    commits = BackgroundCommits("group", lambda *values: seen.append(values))
    inner = FunctionOutput(failing, at_most_once=True)
    output = GroupOutput(inner, cast("Any", session), [(Cluster({}, (0,), 1), commits)])
    output.start()
    assert output.drain()
    session.latest = checkpoint(5)
    with pytest.raises(LostOutputError):
        output.after_checkpoint(NO_FRAME, session.latest.ref)
    assert output.drain(5)
    output.close()
    assert seen == [({("in", 0): 40}, 4), ({("in", 0): 50}, 5)]


@pytest.mark.parametrize("error", [RuntimeError("it fails"), SystemExit("it ends its thread")])
def test_output_at_most_once_is_lost_however_its_function_ends(error: BaseException) -> None:
    """The checkpoint exists, so the function is not called again; the error says what is lost."""

    def fail(_batch: DataFrame, _id: int) -> None:
        raise error

    with pytest.raises(LostOutputError, match=f"output of batch 5 is lost in whole or in part.*: {error}"):
        FunctionOutput(fail, at_most_once=True).after_checkpoint(NO_FRAME, checkpoint(5).ref)


def test_no_group_unless_asked_for() -> None:
    """Other options leave the output as it is; options of a group that is not named are refused."""
    assert with_group(PLAN, NO_FRAME, {"checkpointLocation": "x"}) is PLAN
    for options in ({"consumerGroup.bootstrap.servers": "b:1"}, {"consumerGroup": " "}):
        with pytest.raises(InvalidInputError, match=r"needs the group: option\('consumerGroup', name\)"):
            with_group(PLAN, NO_FRAME, options)
