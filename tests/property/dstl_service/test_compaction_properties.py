"""
Compactions of random logs, with changing parallelism and materializations between them, checked against a model.

Steps: checkpoints are completed one after the other; compactions are planned and executed at random moments, and their
results are applied some checkpoints later, or never; materializations are applied late as well, also between a
compaction and its result. After every checkpoint its state is reconstructed from the view. A failure means that a
restore would return a state other than the log's.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from dstl_service.compaction.compactor import Compactor
from dstl_service.compaction.plan import (
    CompactionSettings,
    Replacement,
    apply,
    choose_compactions,
    log_size,
)
from dstl_service.formats.manifest import StateView
from dstl_service.restore.segment_cache import SegmentCache
from dstl_service.wire import OperatorInfo
from storage.change_set import decode_change_set, encode_change_set
from storage.key_group_sets import KeyGroups, without_all
from storage.key_groups import KeyGroupRange, key_group_range
from storage.memory_store import MemoryStore
from storage.model import ChangeSetId, MaterializationHandle, Segment, SegmentHandle, SegmentKind, Writer
from storage.segment_format import encode_object
from storage.segment_reader import read_segments
from storage.testing import FakeClock, FakeIds

MAX_PARALLELISM = 8
SETTINGS = CompactionSettings(floor_bytes=1, log_ratio_max=0.5, segments_max=30)

LARGE_BYTES = 1500
"""Some change sets."""

State = dict[bytes, bytes]


class CompactedTables:
    """Tables of one operator whose log is written, compacted and materialized, with a model of their state."""

    def __init__(self, chance: random.Random, settings: CompactionSettings = SETTINGS) -> None:
        self.chance = chance
        self.settings = settings
        self.ids = FakeIds()
        self.store = MemoryStore(clock=FakeClock(), ids=self.ids)
        self.view = StateView((), [])
        self.model: State = {}
        self.history: list[State] = []
        self.waiting: list[Replacement] = []
        self.snapshots: dict[str, State] = {}
        self.materializing: list[MaterializationHandle] = []
        self.parallelism = chance.randint(1, 4)
        self.compacted = 0
        self.left_alone = 0
        self.taken_in_part = 0
        self.too_large_share = 0.0  # share of partitions that prove too large to merge
        self.emptied_share = 0.0  # of partitions, at each checkpoint
        self.installed_share = 0.5  # of snapshots, at each checkpoint

    def operator(self) -> OperatorInfo:
        return OperatorInfo("op", self.parallelism, "{}", {})

    def stored(self, segments: list[Segment]) -> list[SegmentHandle]:
        """Store an object of these segments."""
        if not segments:
            return []
        buffers, entries = encode_object(segments)
        key = f"job/segments/host/{self.ids.unique_id()}.seg"
        self.store.put(key, buffers)
        return [SegmentHandle(key, sum(map(len, buffers)), entry) for entry in entries]

    def complete(self, checkpoint_id: int) -> None:
        """Complete a checkpoint, and apply all pending results."""
        while self.materializing and self.chance.random() < self.installed_share:
            self.install(self.materializing.pop(0))
        if self.waiting and self.chance.random() < 0.7:
            self.take(self.waiting.pop())
        segments = []
        for partition in range(self.parallelism):
            key_groups = key_group_range(partition, self.parallelism, MAX_PARALLELISM)
            changes = self.changes(key_groups)
            for key, value in changes.items():
                if value is None:
                    self.model.pop(key, None)
                else:
                    self.model[key] = value
            if changes:
                set_id = ChangeSetId("job", "op", checkpoint_id, Writer(1, self.chance.randint(1, 99)), partition, 0)
                segments.append(Segment.of(set_id, key_groups, len(changes), encode_change_set(changes)))
        self.view = replace(self.view, log=[*self.view.log, *self.stored(segments)])
        self.history.append(dict(self.model))

    def take(self, replacement: Replacement) -> None:
        """Apply a compaction's result, as far as it fits."""
        before = self.view
        self.view = apply(before, replacement) or before
        self.taken_in_part += self.view is not before and not set(self.view.log).issuperset(replacement.added)

    def changes(self, key_groups: KeyGroupRange) -> dict[bytes, bytes | None]:
        """Return random changes of a few keys of these key groups."""
        keys = [
            bytes([0, self.chance.randint(key_groups.first, key_groups.last), self.chance.randint(0, 3)])
            for _ in range(self.chance.randint(0, 4))
        ]
        changes = {key: self.chance.randbytes(2) if self.chance.random() < 0.6 else None for key in keys}
        if self.emptied_share and self.chance.random() < self.emptied_share:
            changes = dict.fromkeys(key for key in {*keys, *self.model} if key_groups.contains(key[1]))
        return changes

    def compact(self, checkpoint_id: int) -> None:
        """Execute the due compactions; the results stay pending."""
        # Not used here.
        compactor = Compactor(self.store, SegmentCache(1 << 20), None, None, 1 << 30)  # type: ignore[arg-type]
        sizes = {"op": log_size(self.view, "op")}
        operators = [self.operator()]
        chosen = choose_compactions(self.view, operators, sizes, checkpoint_id, MAX_PARALLELISM, self.settings)
        for compaction in chosen:
            segments: list[Segment] = []
            too_large: set[int] = set()
            for output in compaction.outputs:
                merged = compactor._merge("job", 1, compaction, output, {})
                if merged is None or self.chance.random() < self.too_large_share:
                    too_large.add(output.partition)
                else:
                    segments += merged
            self.waiting.append(Replacement(compaction, tuple(self.stored(segments)), "uid", frozenset(too_large)))
            self.compacted += 1
            self.left_alone += len(compaction.inputs) < len(self.view.log)

    def materialize(self, checkpoint_id: int) -> None:
        """Take a snapshot of one partition; it is applied later."""
        partition = self.chance.randrange(self.parallelism)
        key_groups = key_group_range(partition, self.parallelism, MAX_PARALLELISM)
        handle = MaterializationHandle("op", key_groups, checkpoint_id, self.ids.unique_id(), "index", 10)
        self.snapshots[handle.uid] = {k: v for k, v in self.model.items() if key_groups.contains(k[1])}
        self.materializing.append(handle)

    def install(self, handle: MaterializationHandle) -> None:
        """Apply a materialization, unless the view has newer bases or materializations of its key groups."""
        newer_base = any(
            segment.entry.kind is SegmentKind.BASE
            and segment.entry.key_groups.intersects(handle.key_groups)
            and segment.entry.id.checkpoint_id > handle.checkpoint_id
            for segment in self.view.log
        )
        if newer_base or any(
            m.key_groups.intersects(handle.key_groups) and m.checkpoint_id > handle.checkpoint_id
            for m in self.view.materializations
        ):
            return
        old = [m for m in self.view.materializations if not handle.key_groups.covers(m.key_groups)]
        self.view = replace(self.view, materializations=(*old, handle))
        self.view = replace(self.view, log=[h for h in self.view.log if self.counting(h)])

    def counting(self, handle: SegmentHandle) -> KeyGroups:
        """Return the key groups for which a segment counts."""
        newer = [m for m in self.view.materializations if m.checkpoint_id >= handle.entry.id.checkpoint_id]
        return without_all(handle.entry.key_groups, [m.key_groups for m in newer])

    def restored(self) -> State:
        """Reconstruct the state from the view."""
        state: State = {}
        for snapshot in sorted(self.view.materializations, key=lambda m: m.checkpoint_id):
            state = {k: v for k, v in state.items() if not snapshot.key_groups.contains(k[1])}
            state.update(self.snapshots[snapshot.uid])
        order = sorted(self.view.log, key=lambda h: (h.entry.id.checkpoint_id, h.entry.id.partition, h.entry.id.sqn))
        for handle, payload in read_segments(self.store, order):
            counting = self.counting(handle)
            for key, value in decode_change_set(payload, "segment"):
                if any(part.contains(key[1]) for part in counting):
                    if value is None:
                        state.pop(key, None)
                    else:
                        state[key] = value
        return state


@pytest.mark.parametrize("materializes", [False, True])
@pytest.mark.parametrize("seed", range(60))
def test_compacted_log_has_same_state(seed: int, materializes: bool) -> None:
    """I14: with compactions, materializations and rescaling, the state of every checkpoint equals its changes."""
    assert run(CompactedTables(random.Random(seed)), materializes=materializes).compacted > 0


def test_result_is_taken_in_part() -> None:
    """I14: the same holds if some partitions of a result were materialized before it is applied."""
    runs = [run(CompactedTables(random.Random(seed)), materializes=True) for seed in range(100, 160)]

    assert sum(tables.taken_in_part for tables in runs) > 10


def test_log_of_large_partitions_has_same_state() -> None:
    """I14: the same holds if partitions with too long a log are not merged, whatever they share with others."""
    runs = [
        run(CompactedTables(random.Random(seed), replace(SETTINGS, base_bytes_max=LARGE_BYTES)), materializes=True)
        for seed in range(60)
    ]

    assert sum(tables.left_alone for tables in runs) > 10


@pytest.mark.parametrize("materializes", [False, True])
def test_log_of_partitions_that_are_not_merged_has_same_state(materializes: bool) -> None:
    """I14: the same holds if partitions prove too large while they are merged."""
    for seed in range(200, 230):
        tables = CompactedTables(random.Random(seed))
        tables.too_large_share = 0.2
        run(tables, materializes=materializes)


def test_log_of_partitions_that_become_empty_has_same_state() -> None:
    """I14: the same holds if often nothing is left of a partition: a snapshot from before must not bring it back."""
    for seed in range(300, 310):
        tables = CompactedTables(random.Random(seed))
        tables.emptied_share, tables.installed_share = 0.4, 0.15
        run(tables, materializes=True)


def run(tables: CompactedTables, *, materializes: bool) -> CompactedTables:
    """Complete checkpoints one after the other, and compare the state of each of them."""
    chance = tables.chance
    for checkpoint_id in range(30):
        tables.complete(checkpoint_id)

        assert tables.restored() == tables.model, f"checkpoint {checkpoint_id}"
        if not tables.waiting and chance.random() < 0.7:
            tables.compact(checkpoint_id)
        if materializes and chance.random() < 0.2:
            tables.materialize(checkpoint_id)
        if chance.random() < 0.1:
            tables.parallelism = chance.randint(1, 4)
    return tables


@pytest.mark.parametrize("seed", range(10))
def test_log_stays_within_its_bound(seed: int) -> None:
    """A log without materializations consists only of a base just after its compaction."""
    tables = CompactedTables(random.Random(seed))
    for checkpoint_id in range(20):
        tables.complete(checkpoint_id)
        tables.waiting.clear()
        tables.compact(checkpoint_id)
        if tables.waiting:
            view = apply(tables.view, tables.waiting[0])
            assert view is not None
            assert log_size(view, "op").log_bytes == 0
