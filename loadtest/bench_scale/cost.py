"""The cost of requests to an object store per day, by the number of partitions. No I/O."""

from __future__ import annotations

from dataclasses import dataclass

from loadtest.bench_scale.manifests import hosts_of

DAY_S = 86_400
PUT_DOLLARS = 0.005 / 1000
GET_DOLLARS = 0.0004 / 1000
"""List prices of S3 standard in us-east-1, which users replace by their own."""
SNAPSHOT_INTERVAL_S = 600
PUTS_PER_SNAPSHOT = 3
"""One index and two new files: assumed, as it depends on the table's compactions."""


@dataclass(frozen=True, slots=True)
class DailyCost:
    """Requests of a day, and their price in dollars."""

    puts: float
    gets: float

    @property
    def dollars(self) -> float:
        """The price of all requests."""
        return self.puts * PUT_DOLLARS + self.gets * GET_DOLLARS


def shared_objects(partitions: int, batch_s: float, segments_per_host: float, manifests: float) -> DailyCost:
    """
    Return the requests of DSTL: one object per host and checkpoint, a manifest, and snapshots of the tables.

    Args:
        partitions: Of one operator, all of which change in each batch.
        batch_s: Time between two batches, > 0.
        segments_per_host: Measured segment objects per host and checkpoint.
        manifests: Measured other objects per checkpoint.
    """
    checkpoints = DAY_S / batch_s
    snapshots = partitions * DAY_S / max(SNAPSHOT_INTERVAL_S, batch_s)
    puts = checkpoints * (segments_per_host * hosts_of(partitions) + manifests) + snapshots * PUTS_PER_SNAPSHOT
    return DailyCost(puts, snapshots)  # one GET checks each snapshot's index


def file_per_partition(partitions: int, batch_s: float, files_per_batch: float = 2.0) -> DailyCost:
    """
    Return the requests of a state store that writes one file per partition and batch.

    Its snapshots and look-ups are left out, which makes it look better than it is.

    Args:
        partitions: Of one operator.
        batch_s: Time between two batches, > 0.
        files_per_batch: The batch's other files: those of offsets and commits.
    """
    return DailyCost(DAY_S / batch_s * (partitions + files_per_batch), 0)
