"""Offsets are committed beside the query: the latest ones, whatever the brokers do."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest

from backend_client.sources.background_commits import BackgroundCommits, CommitTimes
from backend_client.sources.kafka_positions import Positions
from storage.errors import UnavailableError
from tests.waiting import wait_until

HOUR = 3600.0


class Group:
    """Takes offsets when it may; counts tries."""

    def __init__(self) -> None:
        self.is_up = threading.Event()
        self.answers = threading.Event()
        self.answers.set()
        self.committed: list[int] = []
        self.tries = 0

    def __call__(self, positions: Positions, checkpoint_id: int) -> None:
        """Commit, refuse, or hang."""
        self.tries += 1
        assert self.answers.wait(30)
        if not self.is_up.is_set():
            raise UnavailableError("the brokers are away")
        assert positions == {("in", 0): checkpoint_id * 10}
        self.committed.append(checkpoint_id)


@pytest.fixture
def group() -> Group:
    return Group()


@pytest.fixture
def commits(group: Group) -> Iterator[BackgroundCommits]:
    made = BackgroundCommits("consumer group 'g'", group, CommitTimes(pause_s=HOUR, pause_max_s=HOUR))
    yield made
    made.close()


def submit(commits: BackgroundCommits, checkpoint_id: int) -> None:
    commits.submit({("in", 0): checkpoint_id * 10}, checkpoint_id)


def test_the_latest_offsets_are_committed(group: Group, commits: BackgroundCommits) -> None:
    """Between two commits there is a pause; whatever came meanwhile is one commit, and the end does not wait for it."""
    group.is_up.set()
    submit(commits, 0)
    wait_until(lambda: group.committed == [0])
    for checkpoint_id in range(1, 6):
        submit(commits, checkpoint_id)
    assert commits.flush(30)
    assert group.committed == [0, 5]
    assert commits.flush(30)
    assert group.tries == 2


def test_a_hanging_broker_delays_nobody(group: Group, commits: BackgroundCommits) -> None:
    """Batches hand their offsets over while a commit hangs; the end of the query waits only so long."""
    group.is_up.set()
    group.answers.clear()
    submit(commits, 0)
    wait_until(lambda: group.tries == 1)
    submit(commits, 1)
    assert not commits.flush(0.05)
    group.answers.set()
    assert commits.flush(30)
    assert group.committed == [0, 1]


def test_a_refusal_is_reported_and_tried_again(
    group: Group, commits: BackgroundCommits, caplog: pytest.LogCaptureFixture
) -> None:
    """The end of the query waits for one try; a report comes once a minute, and one when the cause is fixed."""
    caplog.set_level(logging.INFO, "backend_client")
    submit(commits, 0)
    wait_until(lambda: group.tries == 1)
    assert not commits.flush(30)
    assert not commits.flush(30)
    assert group.tries == 3
    group.is_up.set()
    assert commits.flush(30)
    reports = [record.getMessage() for record in caplog.records]
    assert reports == [
        "the offsets of checkpoint 0 could not be committed to consumer group 'g', retrying: the brokers are away",
        "the offsets of checkpoint 0 are committed to consumer group 'g'",
    ]


def test_offsets_of_an_idle_query_are_committed_again(group: Group) -> None:
    """Brokers forget a group to which nothing is committed for a week."""
    group.is_up.set()
    commits = BackgroundCommits("consumer group 'g'", group, CommitTimes(pause_s=0.001, repeated_s=0.01))
    submit(commits, 3)
    wait_until(lambda: len(group.committed) >= 3)
    commits.close()
    assert set(group.committed) == {3}


def test_a_source_without_offsets_commits_nothing(group: Group, commits: BackgroundCommits) -> None:
    """A query whose Kafka source was not read yet has nothing to say."""
    commits.submit({}, 0)
    assert commits.flush(1)
    assert group.tries == 0
