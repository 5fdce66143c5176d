"""The requests of some batches, by an S3 server's access log. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

_LINE = re.compile(r"\] \S+ \S+ \S+ s3_(?P<operation>\w+) (?P<key>\S+) ")
_SNAPSHOT = re.compile(r"/materialized/|\.zip\b|\.sst\b")
"""Snapshots' objects here, and those of Spark's store; they are stored by the clock, not by the batch."""
_COMMITTED = re.compile(r"/commits/(?P<batch>\d+)$")
_WRITES = frozenset(
    ("PutObject", "CopyObject", "UploadPart", "UploadPartCopy", "CreateMultipartUpload", "CompleteMultipartUpload")
)
_LISTS = frozenset(("ListObjects", "ListObjectsV2", "ListMultipartUploads", "ListParts"))
_DELETES = frozenset(("DeleteObject", "DeleteObjects", "AbortMultipartUpload"))


@dataclass(slots=True)
class Requests:
    """
    Numbers of requests, by their price.

    Args:
        puts: PUT, COPY and those of multipart uploads, without those of snapshots.
        snapshot_puts: The same of snapshots.
        lists: Listings, each of which costs as much as a PUT.
        gets: GET and HEAD.
        deletes: Deletions, which cost nothing.
    """

    puts: int = 0
    snapshot_puts: int = 0
    lists: int = 0
    gets: int = 0
    deletes: int = 0
    by_operation: Counter[str] = field(default_factory=Counter)

    def add(self, operation: str, key: str) -> None:
        """Count a request by the server's name of its operation, such as ``PutObject``."""
        self.by_operation[operation] += 1
        if operation in _WRITES:
            is_snapshot = _SNAPSHOT.search(key) is not None
            self.snapshot_puts += is_snapshot
            self.puts += not is_snapshot
        elif operation in _LISTS:
            self.lists += 1
        elif operation in _DELETES:
            self.deletes += 1
        else:
            self.gets += 1


def requests_between(lines: Iterable[str], first: int, last: int) -> Requests:
    """
    Count the requests after the commit of batch `first`, up to and with that of batch `last`.

    Args:
        lines: The access log of one query's run; Spark commits a batch by the object ``commits/N``.
        first: A batch, 0 or later.
        last: A later one.

    Raises:
        ValueError: The log has not both commits.
    """
    found, committed = Requests(), -1
    for line in lines:
        match = _LINE.search(line)
        if match is None:
            continue
        if first <= committed < last:
            found.add(match["operation"], match["key"])
        if match["operation"] in _WRITES and (commit := _COMMITTED.search(match["key"])):
            committed = max(committed, int(commit["batch"]))
    if committed < last:
        raise ValueError(f"the access log ends with the commit of batch {committed}, not {last}")
    return found
