"""One of several drivers of a simulated job: executes batches until another one fences it, and starts again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from dstl_service.composition import Parts
from dstl_service.wire import ChangeSetRef, CheckpointRef, CompleteRequest, OpenJob, OperatorInfo
from storage.change_set import decode_change_set, encode_change_set
from storage.checksum import BytesLike
from storage.errors import ConflictError, DstlError, FencedError, LostChangesError
from storage.key_groups import KeyGroupRange, key_group_range
from storage.model import ChangeSetId, Segment, SegmentHandle, Writer
from storage.segment_reader import read_segments
from tests.simulation.cluster import HOSTS, SimulatedCluster, State, Table

JOB = "job"
OPERATORS = ("counts", "joins")
MAX_PARALLELISM = 16
EVERYTHING = KeyGroupRange(0, MAX_PARALLELISM - 1)
Change = dict[bytes, bytes | None]
T = TypeVar("T")


class CompetingDriver:
    """A driver whose coordinator is the service on `host`."""

    def __init__(self, cluster: SimulatedCluster, host: int) -> None:
        self._cluster = cluster
        self._chance = cluster.chance
        self._host = host
        self._epoch = 0
        self._base: CheckpointRef | None = None
        self.attempts = 0
        self.checkpoints = 0

    async def run(self, batches: int) -> None:
        """Complete some checkpoints, however often another driver takes over meanwhile."""
        goal = self.checkpoints + batches
        while self.checkpoints < goal:
            try:
                await self.take_over()
                while self.checkpoints < goal:
                    await self.execute()
                    if self._chance.random() < 0.05:
                        break
            except (FencedError, ConflictError):
                await asyncio.sleep(self._chance.uniform(1, 20))

    async def take_over(self) -> None:
        """Begin a new epoch; every checkpoint that was reported must be in its past (I3, I4)."""
        opened = await self._ask(lambda parts: parts.opener.open(JOB, OpenJob("driver", MAX_PARALLELISM)))
        assert opened.epoch > self._epoch, "an epoch was given twice"
        self._epoch = opened.epoch
        self._base = opened.latest.ref if opened.latest else None
        past = self._cluster.ancestors(self._base.uid if self._base else None)
        assert {ref.uid for ref in self._cluster.reported} <= past, "a checkpoint that was reported is not in the past"

    async def execute(self) -> None:
        """Execute one batch, again if its sets were lost."""
        checkpoint_id = self._base.id + 1 if self._base else 0
        base = self._base
        while self._base == base:
            await self._ask(lambda parts: parts.checkpointer.begin(JOB, checkpoint_id, self._epoch))
            changes: dict[str, Change] = {operator: {} for operator in OPERATORS}
            parallelism = {operator: self._chance.choice((1, 2, 3)) for operator in OPERATORS}
            try:
                refs = [
                    ref
                    for operator in OPERATORS
                    for partition in range(parallelism[operator])
                    for ref in await self._run_task(checkpoint_id, operator, partition, parallelism[operator], changes)
                ]
                if self._chance.random() < 0.1:
                    await self._ask(lambda parts: parts.checkpointer.abort(JOB, checkpoint_id, self._epoch))
                    continue
                refs = await self._make_durable(refs)
                await self._complete(checkpoint_id, refs, parallelism, changes)
            except LostChangesError:
                assert not all(ref.handle for ref in refs), "durable sets count as lost"
        if self._chance.random() < 0.3:
            await self._check_restore()

    async def _run_task(
        self, checkpoint_id: int, operator: str, partition: int, parallelism: int, changes: dict[str, Change]
    ) -> list[ChangeSetRef]:
        host = self._chance.randrange(len(HOSTS))
        key_groups = key_group_range(partition, parallelism, MAX_PARALLELISM)
        refs: list[ChangeSetRef] = []
        for accepted in (False, True) if self._chance.random() < 0.2 else (True,):
            self.attempts += 1
            refs.clear()
            for sqn in range(self._chance.choice((1, 1, 2))):
                own = self._changes(checkpoint_id, key_groups)
                if accepted:
                    changes[operator].update(own)
                writer = Writer(self._epoch, self.attempts * 2 + self._host)
                set_id = ChangeSetId(JOB, operator, checkpoint_id, writer, partition, sqn)
                segment = Segment.of(set_id, key_groups, len(own), encode_change_set(own))
                preemptive = self._chance.random() < 0.3
                times = self._chance.choice((1, 1, 1, 2))
                sent = [await self._append(host, segment, preemptive=preemptive) for _ in range(times)]
                refs.append(sent[-1])
        return refs

    async def _append(self, host: int, segment: Segment, *, preemptive: bool) -> ChangeSetRef:
        async def append(parts: Parts) -> ChangeSetRef:
            await parts.jobs.owned(segment.id.job, segment.id.writer.epoch)
            return parts.intake.append(segment, preemptive=preemptive)

        return await self._cluster.ask(host, append)

    def _changes(self, checkpoint_id: int, key_groups: KeyGroupRange) -> Change:
        """Return changes that no other set has: a key of its own, keys of all, and a deletion."""
        chance, made = self._chance, Change()
        group = chance.randint(key_groups.first, key_groups.last).to_bytes(2, "big")
        stamp = f"{checkpoint_id}/{self._epoch}/{self.attempts}/{chance.random()}".encode()
        made[group + b"own " + stamp] = stamp
        made[group + b"shared"] = stamp + chance.randbytes(chance.choice((10, 300, 2000)))
        made[group + b"deleted"] = chance.choice((None, stamp))
        return made

    async def _make_durable(self, refs: list[ChangeSetRef]) -> list[ChangeSetRef]:
        """Sometimes get handles, which must be readable at once (I5); and simulate a slow user function."""
        if self._chance.random() < 0.5:
            await self._ask(lambda parts: parts.persister.persist_claimed(JOB, refs, wait=False))
        if self._chance.random() < 0.4:
            handles = (await self._ask(lambda parts: parts.persister.persist_claimed(JOB, refs))).handles
            self._check_readable(handles)
            if self._chance.random() < 0.7:
                refs = [replace(ref, handle=handle.to_dict()) for ref, handle in zip(refs, handles, strict=True)]
        await asyncio.sleep(self._chance.choice((0, 0, 0.05, 1, 100)))
        return refs

    def _check_readable(self, handles: list[SegmentHandle]) -> None:
        healthy, self._cluster.store.healthy = self._cluster.store.healthy, True
        assert len(list(read_segments(self._cluster.store, handles))) == len(handles)
        self._cluster.store.healthy = healthy

    async def _complete(
        self, checkpoint_id: int, refs: list[ChangeSetRef], parallelism: dict[str, int], changes: dict[str, Change]
    ) -> None:
        cluster, base = self._cluster, self._base
        uid = f"{self._chance.getrandbits(64):016x}"
        before = cluster.contents[base.uid] if base else {operator: {} for operator in OPERATORS}
        cluster.contents[uid] = {operator: applied(before[operator], changes[operator]) for operator in OPERATORS}
        cluster.parents[uid] = base.uid if base else None
        operators = [OperatorInfo(operator, parallelism[operator], "{}", {}) for operator in OPERATORS]
        request = CompleteRequest(self._epoch, uid, base, refs, operators)
        answer = await self._ask(lambda parts: parts.checkpointer.complete(JOB, checkpoint_id, request))
        assert (answer.ref.id, answer.ref.uid) == (checkpoint_id, uid)
        self._base = answer.ref
        cluster.reported.append(answer.ref)
        self.checkpoints += 1

    async def _check_restore(self) -> None:
        """Restore the checkpoint that was just completed; only a superseded owner may be refused."""
        base = self._base
        assert base is not None
        for operator in OPERATORS:

            async def restore(parts: Parts, operator: str = operator) -> Table:
                plan, _ = await parts.restores.plan(JOB, operator, EVERYTHING, None, base)
                loop = asyncio.get_running_loop()
                found = await loop.run_in_executor(None, lambda: list(parts.restores.payloads(plan)))
                return table_of(found)

            try:
                table = await self._ask(restore)
            except DstlError:
                newest = self._cluster.reported[-1]
                assert newest.id > base.id + 1, f"{base} cannot be restored"
            else:
                assert table == self._cluster.contents[base.uid][operator], f"{base} was restored with other content"

    async def _ask(self, request: Callable[[Parts], Awaitable[T]]) -> T:
        return await self._cluster.ask(self._host, request)


def applied(table: Table, changes: Change) -> Table:
    """Return a table with changes in it."""
    merged: Change = {**table, **changes}
    return {key: value for key, value in merged.items() if value is not None}


def table_of(found: Sequence[tuple[SegmentHandle, BytesLike]]) -> Table:
    """Return the table that results from these segments, each applied once."""
    places = [(handle.object_key, handle.entry.offset_bytes) for handle, _ in found]
    assert len(set(places)) == len(places), "a segment came twice"
    table: Table = {}
    for handle, payload in found:
        table = applied(table, dict(decode_change_set(payload, handle.object_key)))
    return table


def empty_state() -> State:
    """Return the state before the first checkpoint."""
    return {operator: {} for operator in OPERATORS}
