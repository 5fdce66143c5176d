"""Decides which manifests a recovery writes. No I/O."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from dstl_service.formats.checkpoint_header import header_of
from dstl_service.formats.checkpoint_record import NotedSet
from dstl_service.formats.keys import Place
from dstl_service.formats.manifest import COMPLETE_EVERY, Manifest, ManifestKind, StateView
from dstl_service.registry.manifest_log import place_of_manifest
from dstl_service.registry.takeover import fence
from dstl_service.repair.plan import CheckpointCandidate, RecoveryPlan, Stored, find_set, is_restorable
from dstl_service.repair.scan import Registry
from dstl_service.wire import CheckpointRef
from storage.clock import IdSource
from storage.model import SegmentHandle

_FENCES = 8


def manifests_of(plan: RecoveryPlan, registry: Registry, job_uid: str, stored: Stored) -> list[Manifest]:
    """
    Return the manifests to write, oldest first, so that the chosen checkpoint can be restored.

    The oldest is complete, so nothing before it is needed. A sound manifest is not written again, unless it names what
    is lost.
    """
    newest = plan.path[0].manifest
    passed = {manifest.ref for manifest, _ in plan.passed}
    if newest is not None and not passed and is_restorable(registry, newest):
        return []
    state = state_of(plan, stored)
    path = list(reversed(plan.path))[-COMPLETE_EVERY:]
    own = {one.key: [_require(stored, noted) for noted in one.sets] for one in path}
    own_count = sum(map(len, own.values()))
    manifests: list[Manifest] = []
    before: CheckpointRef | None = None
    for number, one in enumerate(path):
        known = one.manifest
        is_complete = number == 0
        is_next = known is not None and (known.base == before if not is_complete else known.starts_chain)
        if known is not None and is_next and not manifests and known.ref not in passed:
            before = known.ref
            continue
        named = path[number + 1].base if number + 1 < len(path) else None
        wanted = named.generation if named is not None else _first_generation(one, before)
        manifest = Manifest(
            kind=ManifestKind.COMPLETE if is_complete else ManifestKind.DELTA,
            job_uid=job_uid,
            id=one.id,
            generation=_free_generation(registry, one.id, wanted),
            created_ms=one.created_ms,
            segments=tuple(own[one.key]),
            earlier=tuple(state.log[: len(state.log) - own_count]) if is_complete else (),
            materializations=state.materializations if is_complete else (),
            note=one.note if one.note and one.note.object_key not in {h.object_key for h in own[one.key]} else None,
            **header_of(replace(one, base=before)),
        )
        manifests.append(manifest)
        before = manifest.ref
    return manifests


def with_all_state(newest: Manifest, plan: RecoveryPlan, stored: Stored) -> Manifest:
    """Return the chosen checkpoint's manifest, complete in itself."""
    own = tuple(_require(stored, noted) for noted in plan.path[0].sets)
    state = state_of(plan, stored)
    earlier = tuple(state.log[: len(state.log) - len(own)])
    return replace(
        newest,
        kind=ManifestKind.COMPLETE,
        segments=own,
        earlier=earlier,
        materializations=state.materializations,
    )


def missing_fences(
    known: Iterable[Manifest], branch: int, job_uid: str, epoch: int, ids: IdSource, created_ms: int
) -> list[Manifest]:
    """
    Return the fences that end all branches but the one on which the job goes on (I4).

    A driver writes after its own fence, and fences may be lost, so several fences are written in a row.

    Args:
        known: All manifests, those that are to be written too.
        branch: The branch on which the job goes on.
        job_uid: The job's uid.
        epoch: The epoch of the rebuild.
        ids: Names the fences.
        created_ms: Time of creation.
    """
    last = {place_of_manifest(one).branch: one for one in sorted(known, key=place_of_manifest)}
    ends = [
        place_of_manifest(one).next(is_fence=one.is_fence)
        for there, one in last.items()
        if there != branch and not (one.is_fence and one.epoch >= branch)
    ]
    return [
        fence(end._replace(number=end.number + more), job_uid, epoch, ids.unique_id(), created_ms)
        for end in ends
        for more in range(_FENCES)
    ]


def state_of(plan: RecoveryPlan, stored: Stored) -> StateView:
    """Return the whole state of the chosen checkpoint, oldest first."""
    oldest = plan.path[-1].start
    assert oldest is not None  # a path ends at a known start
    log = [_require(stored, NotedSet(handle.entry.id, handle.entry.checksum)) for handle in oldest.log]
    log += [_require(stored, noted) for one in reversed(plan.path) for noted in one.sets]
    return StateView(oldest.materializations, log)


def _require(stored: Stored, noted: NotedSet) -> SegmentHandle:
    handle = find_set(stored, noted)
    assert handle is not None  # a path has only stored sets
    return handle


def _first_generation(one: CheckpointCandidate, before: CheckpointRef | None) -> int:
    """Return the first generation of the branch that a rewind began, or in which a checkpoint follows another."""
    if one.rewound_from is not None:
        return Place(one.epoch, one.id, 0).generation
    before = before or one.base  # the oldest one that is written follows one that is not
    return Place.of(0, before.generation)._replace(number=0).generation if before is not None else 0


def _free_generation(registry: Registry, checkpoint_id: int, wanted: int) -> int:
    """
    Return the `wanted` generation, or the next one that is free and after all fences of its branch.

    A checkpoint in front of a fence would leave the next id open to older drivers (I4). If a sound checkpoint of the id
    comes later, the result is after everything there.
    """
    taken = {generation for there, generation in registry.manifests if there == checkpoint_id}
    floor = max((manifest.generation for manifest in registry.checkpoints if manifest.id == checkpoint_id), default=-1)
    if wanted <= floor:
        return max(taken) + 1
    branch = Place.of(checkpoint_id, wanted).branch
    there = (generation for generation in taken if Place.of(checkpoint_id, generation).branch == branch)
    return max(wanted, max(there, default=-1) + 1)
