"""Sizes of manifests by the number of partitions, from the service's own encoding. No I/O."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from dstl_service.formats.manifest import COMPLETE_EVERY, Manifest, ManifestKind, encode_manifest
from dstl_service.wire import CheckpointRef, OperatorInfo
from storage.key_groups import key_group_range
from storage.model import ChangeSetId, MaterializationHandle, SegmentEntry, SegmentHandle, Writer

PARTITIONS_PER_HOST = 50
SET_BYTES = 4_096
_MAX_PARALLELISM = 32_768
_OPERATOR = "totals"
_SEED = 15


@dataclass(frozen=True, slots=True)
class ManifestSizes:
    """Encoded sizes in bytes of a checkpoint's manifest: of most, and of every `COMPLETE_EVERY`-th."""

    delta: int
    complete: int

    @property
    def mean(self) -> float:
        """Mean size over a chain."""
        return self.delta + (self.complete - self.delta) / COMPLETE_EVERY


def hosts_of(partitions: int) -> int:
    """Return the number of hosts for this many partitions of one operator."""
    return -(-partitions // PARTITIONS_PER_HOST)


def manifest_sizes(partitions: int) -> ManifestSizes:
    """
    Encode the manifests of a job of one operator, each of whose partitions changes in each checkpoint.

    The complete one names a snapshot of each table and the log of `COMPLETE_EVERY` checkpoints after it.

    Args:
        partitions: 1..32768.
    """
    chance = Random(_SEED)
    newest = _handles(partitions, 1_000_000, chance)
    delta = _manifest(ManifestKind.DELTA, partitions, newest, chance)
    earlier = [handle for back in range(1, COMPLETE_EVERY) for handle in _handles(partitions, 1_000_000 - back, chance)]
    snapshots = tuple(_snapshot(partition, partitions, chance) for partition in range(partitions))
    complete = _manifest(ManifestKind.COMPLETE, partitions, newest, chance, tuple(earlier), snapshots)
    return ManifestSizes(len(encode_manifest(delta)), len(encode_manifest(complete)))


def _manifest(
    kind: ManifestKind,
    partitions: int,
    segments: list[SegmentHandle],
    chance: Random,
    earlier: tuple[SegmentHandle, ...] = (),
    materializations: tuple[MaterializationHandle, ...] = (),
) -> Manifest:
    return Manifest(
        kind=kind,
        job_uid=_uid(chance),
        id=1_000_000,
        generation=0,
        uid=_uid(chance),
        epoch=3,
        created_ms=1_700_000_000_000,
        base=CheckpointRef(999_999, 0, _uid(chance)),
        query_id=_uid(chance),
        offsets='{"logOffset": 1000000}',
        operators=(OperatorInfo(_OPERATOR, partitions, "{}", {}),),
        segments=tuple(segments),
        earlier=earlier,
        materializations=materializations,
    )


def _handles(partitions: int, checkpoint_id: int, chance: Random) -> list[SegmentHandle]:
    """Return the handles of one change set of each partition; the sets of a host share an object."""
    handles = []
    for host in range(hosts_of(partitions)):
        key = f"job/segments/host-{host}/{_uid(chance)}.seg"
        of_host = range(host * PARTITIONS_PER_HOST, min(partitions, (host + 1) * PARTITIONS_PER_HOST))
        size_bytes = (SET_BYTES + 200) * len(of_host)
        for place, partition in enumerate(of_host):
            attempt = checkpoint_id * partitions + partition
            set_id = ChangeSetId("job", _OPERATOR, checkpoint_id, Writer(3, attempt), partition, 0)
            groups = key_group_range(partition, partitions, _MAX_PARALLELISM)
            entry = SegmentEntry(set_id, groups, 40, 16 + place * SET_BYTES, SET_BYTES, chance.getrandbits(64))
            handles.append(SegmentHandle(key, size_bytes, entry))
    return handles


def _snapshot(partition: int, partitions: int, chance: Random) -> MaterializationHandle:
    groups, uid = key_group_range(partition, partitions, _MAX_PARALLELISM), _uid(chance)
    key = f"job/materialized/{_OPERATOR}/{groups.first:05d}-{groups.last:05d}/{uid}.json"
    return MaterializationHandle(_OPERATOR, groups, 999_900, uid, key, 50_000_000)


def _uid(chance: Random) -> str:
    return f"{chance.getrandbits(128):032x}"
