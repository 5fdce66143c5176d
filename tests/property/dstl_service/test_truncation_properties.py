"""
A state whose log is truncated and compacted at random, against a plain dict.

Steps: checkpoints log changes of partitions, whose number changes; snapshots of tables are taken and enter some
checkpoints later; compactions read a state and enter later, if they still fit. A failure means that some table would be
restored to a value that the log never had at that checkpoint.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from dstl_service.compaction.plan import CompactionSettings, Replacement, apply, choose_compactions, log_size
from dstl_service.formats.manifest import StateView, select_handles
from dstl_service.restore.truncation import bases_of, key_groups_by_materialization, key_groups_of_segment, truncate
from dstl_service.wire import OperatorInfo
from storage.key_groups import KeyGroupRange, key_group_range
from storage.model import (
    ChangeSetId,
    MaterializationHandle,
    SegmentEntry,
    SegmentHandle,
    SegmentKind,
    Writer,
)

KEY_GROUPS = 4
EAGER = CompactionSettings(floor_bytes=1, segments_max=1)
Changes = dict[tuple[int, int], int | None]
"""By key group and key: the value, or None for a deletion."""


def within(changes: Changes, *parts: KeyGroupRange) -> Changes:
    return {key: value for key, value in changes.items() if any(part.contains(key[0]) for part in parts)}


class TruncatedState:
    """One operator's state, changed the way a coordinator changes it."""

    def __init__(self, parallelism: int = 1) -> None:
        self.view = StateView((), [])
        self.model: Changes = {}
        self.checkpoint_id = -1
        self.parallelism = parallelism
        self.number = 0
        self.payloads: dict[str, Changes] = {}
        self.snapshots: dict[str, Changes] = {}
        self.made: list[MaterializationHandle] = []
        self.compacted: list[Replacement] = []

    def segment(self, key_groups: KeyGroupRange, partition: int, changes: Changes, kind: SegmentKind) -> SegmentHandle:
        """Store a segment."""
        self.number += 1
        set_id = ChangeSetId("job", "op", self.checkpoint_id, Writer(1, self.number), partition, 0)
        entry = SegmentEntry(set_id, key_groups, len(changes), 16, 1 + len(changes), 0, kind)
        key = f"{self.number}.seg"
        self.payloads[key] = changes
        return SegmentHandle(key, 1000, entry)

    def checkpoint(self, changed: Changes, *, entering: int = 0, compacting: bool = False) -> None:
        """Complete a checkpoint: pending results enter its state, then its changes are logged, perhaps compacted."""
        made, self.made = self.made[:entering], self.made[entering:]
        view = truncate(self.view, made)
        for replacement in self.compacted[:1]:
            view = apply(view, replacement) or view
        self.compacted = []
        self.checkpoint_id += 1
        log = list(view.log)
        for partition in range(self.parallelism):
            key_groups = key_group_range(partition, self.parallelism, KEY_GROUPS)
            own = within(changed, key_groups)
            if own:
                log.append(self.segment(key_groups, partition, own, SegmentKind.CHANGES))
        self.view = replace(view, log=log)
        self.model.update(changed)
        self.model = {key: value for key, value in self.model.items() if value is not None}
        if compacting:
            self.compact()

    def snapshot(self, key_groups: KeyGroupRange) -> None:
        """Take a snapshot of a table at the newest checkpoint, of any key groups, as at an older parallelism."""
        if self.checkpoint_id < 0:
            return
        self.number += 1
        uid = f"m{self.number:05d}"
        self.snapshots[uid] = within(self.model, key_groups)
        self.made.append(MaterializationHandle("op", key_groups, self.checkpoint_id, uid, uid, 1))

    def compact(self) -> None:
        """Compact the current log; the result waits for the next checkpoint."""
        operator = OperatorInfo("op", self.parallelism, "{}", {})
        sizes = {operator.name: log_size(self.view, operator.name)}
        for compaction in choose_compactions(self.view, [operator], sizes, self.checkpoint_id, KEY_GROUPS, EAGER):
            added = []
            for output in compaction.outputs:
                merged: Changes = {}
                for handle, parts in output.inputs:
                    merged.update(within(self.payloads[handle.object_key], *parts))
                if output.kind is SegmentKind.BASE:
                    merged = {key: value for key, value in merged.items() if value is not None}
                added.append(self.segment(output.key_groups, output.partition, merged, output.kind))
            self.compacted.append(Replacement(compaction, tuple(added), "uid"))

    def check(self) -> None:
        """Restore tables of several parallelisms; every part of the state must count for one of them."""
        for parallelism in (1, 3):
            for partition in range(parallelism):
                wanted = key_group_range(partition, parallelism, KEY_GROUPS)
                assert self.restored(wanted) == within(self.model, wanted)
        for handle in self.view.log:
            assert key_groups_of_segment(handle, self.view.materializations, KeyGroupRange(0, KEY_GROUPS - 1))

    def restored(self, wanted: KeyGroupRange) -> Changes:
        """Restore a table by a plan."""
        table: Changes = {}
        counted = key_groups_by_materialization(self.view.materializations, bases_of(self.view.log, "op"), wanted)
        for materialization, parts in counted:
            table.update(within(self.snapshots[materialization.uid], *parts))
        for handle in select_handles(self.view.log, "op", wanted):
            parts = key_groups_of_segment(handle, [item for item, _ in counted], wanted)
            table.update(within(self.payloads[handle.object_key], *parts))
        return {key: value for key, value in table.items() if value is not None}


@pytest.mark.parametrize("seed", range(5))
def test_every_table_is_restored(seed: int) -> None:
    """I14: for a table of any key groups, its plan leads to the values of the newest checkpoint."""
    chance = random.Random(seed)
    for _ in range(150):
        state = TruncatedState(chance.randint(1, 4))
        for _ in range(25):
            match chance.randrange(8):
                case 0:
                    state.parallelism = chance.randint(1, 4)
                case 1 | 2:
                    first, last = sorted(chance.choices(range(KEY_GROUPS), k=2))
                    state.snapshot(KeyGroupRange(first, last))
                case _:
                    keys = chance.sample(range(KEY_GROUPS), chance.randint(0, KEY_GROUPS))
                    changed = {(key, 0): chance.choice([None, None, 1, 2, 3]) for key in keys}
                    state.checkpoint(changed, entering=chance.choice([0, 0, 1, 3]), compacting=chance.random() < 0.3)
            state.check()


def test_late_snapshot_brings_no_deleted_key_back() -> None:
    """A snapshot that is applied after a newer base is not used: the base does not record deletions between them."""
    state = TruncatedState()
    state.checkpoint({(0, 0): 1})
    state.checkpoint({(1, 0): 1})
    state.snapshot(KeyGroupRange(0, KEY_GROUPS - 1))
    state.checkpoint({(0, 0): None}, compacting=True)
    state.checkpoint({})
    state.checkpoint({}, entering=1)

    assert state.view.materializations == ()
    assert [handle.entry.kind for handle in state.view.log] == [SegmentKind.BASE]
    state.check()
