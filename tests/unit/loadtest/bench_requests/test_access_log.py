"""Requests are counted by an S3 server's access log, from one commit to another."""

from __future__ import annotations

import pytest

from loadtest.bench_requests.__main__ import figures_of
from loadtest.bench_requests.access_log import Requests, requests_between


def _line(operation: str, key: str = "-") -> str:
    return f"access bucket [25/November/2026:18:45:06 +0000] 127.0.0.1 access 1HHD s3_{operation} {key} /uri 200 - 0 0"


def test_requests_from_commit_to_commit() -> None:
    """Requests after a batch's commit are the next batch's, its own commit included; a repeated commit ends nothing."""
    lines = [
        "log starts 2026",
        _line("PutObject", "a/commits/0"),
        _line("PutObject", "a/state/1.changelog"),
        _line("CopyObject", "a/commits/1"),
        _line("HeadObject", "a/commits/2"),
        _line("PutObject", "a/state/.2.tmp"),
        _line("UploadPart", "a/state/2.zip"),
        _line("ListObjectsV2"),
        _line("GetObject", "a/state/1.changelog"),
        _line("DeleteObject", "a/state/.2.tmp"),
        _line("PutObject", "a/commits/.2.0f.tmp"),
        _line("CopyObject", "a/commits/2"),
        _line("PutObject", "a/commits/1"),
        _line("PutObject", "a/state/3.changelog"),
        _line("CopyObject", "a/commits/3"),
        _line("PutObject", "a/materialized/x/000004.sst"),
    ]
    found = requests_between(lines, 1, 2)

    assert (found.puts, found.snapshot_puts, found.lists, found.gets, found.deletes) == (3, 1, 1, 2, 1)
    assert requests_between(lines, 0, 3).puts == 8


def test_log_without_the_commits_is_refused() -> None:
    """A run that ended too early gives no figures."""
    with pytest.raises(ValueError, match="ends with the commit of batch 1, not 4"):
        requests_between([_line("PutObject", "a/commits/1")], 0, 4)


@pytest.mark.parametrize(("spark", "holds"), [(2_600, True), (2_400, False)])
def test_goal_is_for_both_sides_puts(spark: int, holds: bool) -> None:
    """The ratio of PUTs has the goal, without snapshots, and at 200 partitions only."""
    counted = {"Spark": Requests(puts=spark, snapshot_puts=100), "DSTL": Requests(puts=100, snapshot_puts=900)}
    figures = {figure.name: figure for figure in figures_of(counted, 10, 200)}

    assert figures["PUTs of Spark / PUTs of DSTL, without snapshots"].holds is holds
    assert figures["DSTL, 200 partitions on 4 hosts, per batch: PUTs of snapshots, which go by time"].value == 90
    assert all(figure.goal is None for figure in figures_of(counted, 10, 16))
