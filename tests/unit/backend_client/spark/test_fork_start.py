"""The first start of a fork: which Spark checkpoint it takes, and what it needs of the parent's."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from backend_client.settings import BackendSettings
from backend_client.spark.start.fork_start import check_fork, follow, is_at_fork, logs_of
from dstl_service.wire import CheckpointInfo, CheckpointRef, ForkOrigin
from storage.errors import InvalidInputError

KAFKA, FILES, RATE = '{"topic":{"0":7}}', '{"logOffset":3}', "12"
FIRST = CheckpointRef(5, 0, "first")
ORIGIN = "fork-at-5-x"
SETTINGS = BackendSettings("file:///s", "fork")


@dataclass
class FakeLog:
    """A Spark checkpoint with a query id, made for the checkpoint of a uid."""

    id: str | None
    uid: str | None = None
    location: str = "chk"
    origin: str = ""
    newest: int | None = None

    def query_id(self) -> str | None:
        return self.id

    def begins_at(self, uid: str) -> bool:
        return uid == self.uid

    def is_of_fork(self, origin: str) -> bool:
        return origin == self.origin

    def rewind(self, batch_id: int, offsets: str, uid: str, closed_ms: int | None, newest: int | None) -> None:
        self.uid, self.newest = uid, newest


def entry(*sources: str) -> str:
    """Return Spark's offsets entry of these sources."""
    return "\n".join(["v1", '{"batchWatermarkMs":0,"batchTimestampMs":1}', *sources])


def first(*sources: str, rewound_from: CheckpointRef | None = None) -> CheckpointInfo:
    """Return the checkpoint with which a fork begins."""
    origin = ForkOrigin("job", 0, CheckpointRef(5, 0, "theirs"), ORIGIN)
    offsets = entry(*sources or (KAFKA,))
    return CheckpointInfo(FIRST, None, 0, 0, "parents", offsets, [], 0, 0, rewound_from, None, origin)


def check(log: FakeLog, latest: CheckpointInfo, parent: FakeLog | None = None) -> None:
    """Check a fork's Spark checkpoint, and that of its parent's query."""
    check_fork(log, latest, SETTINGS, parent)  # type: ignore[arg-type] # all that it asks for


def test_sources_that_keep_a_log() -> None:
    """Kafka's offsets say all; files are numbered in Spark's checkpoint, and a source by time notes when it began."""
    assert logs_of(entry(KAFKA)) == {}
    assert logs_of(entry(KAFKA, FILES, "-", RATE)) == {1: 3, 3: None}
    assert logs_of("") == {}


def test_new_spark_checkpoint_is_taken() -> None:
    """A fork begins in a new one, or in one that was made for it before it had a batch."""
    check(FakeLog(None), first())
    check(FakeLog("own", "first", origin=ORIGIN), first())
    check(FakeLog("own", "older", origin=ORIGIN), first(rewound_from=FIRST))


def test_fork_that_was_set_back_keeps_its_spark_checkpoint() -> None:
    """I14: in a new one, batches would have the ids of those given up, and Spark's sinks would leave them out."""
    with pytest.raises(InvalidInputError, match="Use the checkpointLocation that the fork was started with"):
        check(FakeLog(None), first(rewound_from=CheckpointRef(7, 0, "given-up")))


@pytest.mark.parametrize(
    ("log", "latest"),
    [
        (FakeLog("parents"), first()),
        (FakeLog("other"), first()),
        (FakeLog("other", origin="fork-at-5-y"), first()),
        (FakeLog("parents"), first(rewound_from=FIRST)),
        (FakeLog("other", "set-back"), first(rewound_from=FIRST)),
    ],
)
def test_spark_checkpoint_of_another_query_is_refused(log: FakeLog, latest: CheckpointInfo) -> None:
    """I14: it stays as it is: the parent's would be continued by two queries, another's be set back with the fork."""
    with pytest.raises(InvalidInputError, match="use a new checkpointLocation"):
        check(log, latest)


def test_sources_of_files_need_the_parents_log() -> None:
    """Without it Spark would read all files again, under numbers that count as read."""
    with pytest.raises(InvalidInputError, match="set fork_location"):
        check(FakeLog(None), first(FILES))


@pytest.mark.parametrize(
    ("parent", "fits"),
    [
        (FakeLog("parents"), True),
        (FakeLog("other", "theirs"), True),
        (FakeLog("other"), False),
        (FakeLog("other", "first"), False),
        (FakeLog(None), False),
    ],
    ids=["its query's", "made for a parent that is a fork", "another query's", "made for another fork", "nobody's"],
)
def test_sources_of_files_need_the_log_of_their_own_query(parent: FakeLog, fits: bool) -> None:
    """I14: another query's log would have a fork read its files again, or never. Kafka needs none, so any is taken."""
    check(FakeLog(None), first(), parent)
    if fits:
        check(FakeLog(None), first(FILES), parent)
        return
    with pytest.raises(InvalidInputError, match="is not the Spark checkpoint of the query that job 'job' had at"):
        check(FakeLog(None), first(FILES), parent)


@pytest.mark.parametrize(
    ("checkpoint_id", "groups", "rewound", "is_set_back"),
    [(5, None, False, True), (6, 8, False, True), (6, None, False, False), (9, None, True, True), (9, 8, False, False)],
    ids=["first", "rewritten", "first batch", "rewound", "later batch"],
)
def test_spark_checkpoint_follows(checkpoint_id: int, groups: int | None, rewound: bool, is_set_back: bool) -> None:
    """I14: the Spark checkpoint of a fork that has had no batch stands where the fork does, also after a rewind."""
    ref, origin = CheckpointRef(checkpoint_id, 0, "x"), ForkOrigin("job", 0, FIRST, ORIGIN, groups)
    base = None if checkpoint_id == FIRST.id else FIRST
    latest = CheckpointInfo(ref, base, 0, 0, "own", "", [], 0, 0, FIRST if rewound else None, None, origin)
    log = FakeLog("own", "older", origin=ORIGIN)
    follow(None, log, latest, SETTINGS)  # type: ignore[arg-type] # no fork is begun

    assert log.uid == ("x" if is_set_back else "older")
    assert log.newest == (FIRST.id if rewound and is_set_back else None)


def test_only_the_first_checkpoint_is_where_a_fork_begins() -> None:
    """A job that is no fork has a first checkpoint without base, too."""
    assert is_at_fork(first())
    assert not is_at_fork(CheckpointInfo(FIRST, None, 1, 0, "q", "", [], 0, 0))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"fork_of": "job"}, "is the job itself"),
        ({"fork_at": 3}, "fork_of names no job"),
        ({"fork_of": "other", "fork_at": -1}, "fork_at must be a whole number"),
        ({"fork_of": "other", "fork_at": "a/b"}, "savepoint name 'a/b' is not allowed"),
        ({"fork_of": "a/b"}, "job name 'a/b' is not allowed"),
    ],
)
def test_settings_of_a_fork(options: dict[str, object], error: str) -> None:
    """A fork needs another job, and a checkpoint's number or a savepoint's name."""
    with pytest.raises(InvalidInputError, match=error):
        BackendSettings.of("file:///s", "job", options)
