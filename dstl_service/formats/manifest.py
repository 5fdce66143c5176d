"""
The manifest: the one object whose existence is a checkpoint's existence.

A manifest is written once with create-if-absent and never altered (I3). It names its predecessor (`base`), what the
checkpoint added (`segments`), and in a *complete* manifest also all earlier state (`materializations` and the log after
them, `earlier`), so that a restore reads at most `COMPLETE_EVERY` manifests. A replacement for a part of the log (a
materialization, a compaction) enters with a complete manifest. A *fence* occupies a manifest's place for a newer epoch:
an older driver's write conflicts with it (I4). No I/O.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, TypeVar

from dstl_service.formats.checkpoint_header import CheckpointHeader, base_from_json
from dstl_service.formats.checksummed_json import reading, seal, unseal
from dstl_service.formats.fork_origin import held_for_from_json, origin_from_json, origin_to_json
from dstl_service.formats.under_way import NOTHING, UnderWay
from dstl_service.wire import CheckpointInfo, CheckpointRef, FormerSlots, OperatorInfo, RowsSetAside, StateInfo
from storage.errors import CorruptDataError
from storage.key_groups import KeyGroupRange
from storage.model import MaterializationHandle, SegmentEntry, SegmentHandle
from storage.stored_json import text_of, whole_number
from storage.validation import validate_name

FORMAT = 1
COMPLETE_EVERY = 20

_NAME = partial(validate_name, "operator")
_T = TypeVar("_T")


class ManifestKind(enum.StrEnum):
    """Kind of a manifest object."""

    DELTA = "delta"
    COMPLETE = "complete"
    FENCE = "fence"


@dataclass(frozen=True, slots=True)
class Manifest(CheckpointHeader):
    """One manifest. A fence has only `kind`, `job_uid`, `id`, `generation`, `uid`, `epoch` and `created_ms`."""

    kind: ManifestKind
    job_uid: str
    id: int
    generation: int
    created_ms: int
    segments: tuple[SegmentHandle, ...] = ()
    earlier: tuple[SegmentHandle, ...] = ()
    materializations: tuple[MaterializationHandle, ...] = ()
    note: SegmentHandle | None = None
    """The checkpoint's note, see `formats.checkpoint_record`, if it lies in an object that `segments` do not name."""
    kept_by: str = ""
    """In a savepoint, the call that made it, so that no other call deletes it as its own."""
    under_way: UnderWay = NOTHING
    """Snapshots and compactions being stored for later checkpoints, the whole list (see `formats.under_way`)."""
    held_for: str = ""
    """In a savepoint that a fork needs: the fork, as ``<job>@<life>`` (see `dstl_service.registry.forks`)."""

    @property
    def is_fence(self) -> bool:
        """Whether it only occupies its place; else it is a checkpoint's."""
        return self.kind is ManifestKind.FENCE

    @property
    def starts_chain(self) -> bool:
        """Whether it alone has its checkpoint's whole state: it is complete, or the job's first one."""
        return self.kind is ManifestKind.COMPLETE or self.base is None

    @property
    def ref(self) -> CheckpointRef:
        """The name by which other manifests and tables refer to this one."""
        return CheckpointRef(self.id, self.generation, self.uid)

    def info(self) -> CheckpointInfo:
        """Return the checkpoint's entry in a listing."""
        return CheckpointInfo(
            ref=self.ref,
            base=self.base,
            epoch=self.epoch,
            created_ms=self.created_ms,
            query_id=self.query_id,
            offsets=self.offsets,
            operators=list(self.operators),
            segments=len(self.segments),
            segment_bytes=sum(handle.entry.size_bytes for handle in self.segments),
            rewound_from=self.rewound_from,
            closed_ms=self.closed_ms,
            forked_from=self.forked_from,
        )


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the object's bytes; see `dstl_service.formats.checksummed_json`."""
    return seal("manifest", _to_dict(manifest), ensure_ascii=False)


def decode_manifest(data: bytes, object_key: str) -> Manifest:
    """
    Read a manifest object.

    Raises:
        NewerFormatError: A newer version wrote it; names the object, and says what to do.
        CorruptDataError: The object is damaged; names the object.
    """
    with reading(f"manifest {object_key}", object_key=object_key):
        return _from_dict(unseal("manifest", data, FORMAT, object_key))


def is_complete_due(checkpoint_id: int) -> bool:
    """Return whether the checkpoint's manifest must be complete."""
    return checkpoint_id % COMPLETE_EVERY == 0


@dataclass(frozen=True, slots=True)
class StateView:
    """
    The whole state of a checkpoint.

    Args:
        materializations: Snapshots of tables; each holds its key groups up to its checkpoint.
        log: Segments, oldest first. For a key group in a materialization, those up to its checkpoint are ignored: such
            a segment is only here for its other key groups.
    """

    materializations: tuple[MaterializationHandle, ...]
    log: list[SegmentHandle]


def state_up_to(newest_first: Sequence[Manifest]) -> StateView:
    """
    Return the newest checkpoint's state, from the manifests from it back to a complete one.

    Raises:
        CorruptDataError: The sequence neither ends in a complete manifest nor at the job's first checkpoint.
    """
    oldest = newest_first[-1]
    if not oldest.starts_chain:
        raise CorruptDataError(f"the chain of manifests breaks off at checkpoint {oldest.id}; run `dstl fsck`")
    return with_segments(StateView(oldest.materializations, list(oldest.earlier)), newest_first)


def with_segments(view: StateView, newest_first: Sequence[Manifest]) -> StateView:
    """Return the view with the segments that these manifests add."""
    added = [handle for manifest in reversed(newest_first) for handle in manifest.segments]
    return replace(view, log=[*view.log, *added])


def select_handles(handles: Iterable[SegmentHandle], operator: str, key_groups: KeyGroupRange) -> list[SegmentHandle]:
    """Return the handles that hold changes of the operator's key groups, in the order in which they must be applied."""
    wanted = [h for h in handles if h.entry.id.operator == operator and h.entry.key_groups.intersects(key_groups)]
    wanted.sort(key=lambda h: (h.entry.id.checkpoint_id, h.entry.id.partition, h.entry.id.writer, h.entry.id.sqn))
    return wanted


def _to_dict(manifest: Manifest) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "kind": manifest.kind.value,
        "job_uid": manifest.job_uid,
        "id": manifest.id,
        "generation": manifest.generation,
        "uid": manifest.uid,
        "epoch": manifest.epoch,
        "created_ms": manifest.created_ms,
        "base": manifest.base.to_text() if manifest.base else None,
        "query_id": manifest.query_id,
        "offsets": manifest.offsets,
        "operators": operators_to_json(manifest.operators),
        "segments": group_by_object(manifest.segments),
        "earlier": group_by_object(manifest.earlier),
        "materializations": [handle.to_dict() for handle in manifest.materializations],
        "note": manifest.note.to_dict() if manifest.note else None,
        "rewound_from": manifest.rewound_from.to_text() if manifest.rewound_from else None,
        "kept_by": manifest.kept_by,
        **({"under_way": manifest.under_way.to_dict()} if manifest.under_way != NOTHING else {}),
        **({} if manifest.closed_ms is None else {"closed_ms": manifest.closed_ms}),
        **({} if manifest.forked_from is None else {"forked_from": origin_to_json(manifest.forked_from)}),
        **({"held_for": manifest.held_for} if manifest.held_for else {}),
    }


def _from_dict(document: dict[str, Any]) -> Manifest:
    ref = CheckpointRef.parse(f"{document['id']}.{document['generation']}.{document['uid']}")
    return Manifest(
        kind=ManifestKind(document["kind"]),
        job_uid=text_of(document["job_uid"]),
        id=ref.id,
        generation=ref.generation,
        uid=ref.uid,
        epoch=whole_number(document["epoch"]),
        created_ms=whole_number(document["created_ms"]),
        base=base_from_json(document["base"], ref.id),
        query_id=text_of(document["query_id"]),
        offsets=text_of(document["offsets"]),
        operators=operators_from_json(document["operators"]),
        segments=tuple(flatten_objects(document["segments"])),
        earlier=tuple(flatten_objects(document["earlier"])),
        materializations=tuple(MaterializationHandle.from_dict(data) for data in document["materializations"]),
        note=SegmentHandle.from_dict(document["note"]) if document.get("note") else None,
        rewound_from=CheckpointRef.parse(document["rewound_from"]) if document.get("rewound_from") else None,
        kept_by=document.get("kept_by", ""),
        under_way=UnderWay.from_dict(document["under_way"]) if "under_way" in document else NOTHING,
        closed_ms=closed_from_json(document),
        forked_from=origin_from_json(document.get("forked_from")),
        held_for=held_for_from_json(document.get("held_for")),
    )


def closed_from_json(document: dict[str, Any]) -> int | None:
    """Return the watermark at which a batch was closed, or None; older documents lack the field."""
    closed_ms = document.get("closed_ms")
    if closed_ms is not None and type(closed_ms) is not int:
        raise TypeError(f"closed_ms is {closed_ms!r}")
    return closed_ms


def operators_to_json(operators: Iterable[OperatorInfo]) -> list[dict[str, Any]]:
    """Return the JSON form that `operators_from_json` reads."""
    return [
        {
            "name": operator.name,
            "parallelism": operator.parallelism,
            "key_schema": operator.key_schema,
            "states": {
                name: {"id": state.id, "kind": state.kind, "schema": state.schema}
                | ({"earlier": state.earlier} if state.earlier else {})
                | ({} if state.ttl_ms is None else {"ttl_ms": state.ttl_ms})
                for name, state in operator.states.items()
            },
        }
        | ({} if operator.time_mode is None else {"time_mode": operator.time_mode})
        | ({} if operator.output_mode is None else {"output_mode": operator.output_mode})
        | ({} if operator.kind is None else {"kind": operator.kind})
        | ({} if operator.published is None else {"published": operator.published})
        | ({"set_aside": [asdict(rows) for rows in operator.set_aside]} if operator.set_aside else {})
        | ({} if operator.called is None else {"called": operator.called})
        | ({} if operator.renamed_from is None else {"renamed_from": operator.renamed_from})
        | ({"recent": [ref.to_text() for ref in operator.recent]} if operator.recent else {})
        | _former_slots_to_json(operator.former_slots)
        for operator in operators
    ]


def operators_from_json(documents: Iterable[dict[str, Any]]) -> tuple[OperatorInfo, ...]:
    """Read the result of `operators_to_json`; raises as `reading` expects if a value has another type or bound."""
    return tuple(
        OperatorInfo(
            validate_name("operator", document["name"]),
            len(KeyGroupRange(0, whole_number(document["parallelism"]) - 1)),
            text_of(document["key_schema"]),
            {text_of(name): _state_from_json(state) for name, state in document["states"].items()},
            _or_none(text_of, document.get("time_mode")),
            _or_none(text_of, document.get("output_mode")),
            _or_none(text_of, document.get("kind")),
            _or_none(whole_number, document.get("published")),
            [_rows_from_json(rows) for rows in document.get("set_aside", ())],
            _or_none(_NAME, document.get("called")),
            _or_none(_NAME, document.get("renamed_from")),
            [CheckpointRef.parse(text) for text in document.get("recent", ())],
            _former_slots_from_json(document.get("former_slots")),
        )
        for document in documents
    )


def _or_none(read: Callable[[Any], _T], value: Any) -> _T | None:
    return None if value is None else read(value)


def _state_from_json(document: dict[str, Any]) -> StateInfo:
    state = StateInfo(**document)
    whole_number(state.id)
    for text in (state.kind, state.schema, *state.earlier):
        text_of(text)
    _or_none(whole_number, state.ttl_ms)
    return state


def _rows_from_json(document: dict[str, Any]) -> RowsSetAside:
    rows = RowsSetAside(**document)
    times = (rows.timestamp_ms, rows.watermark_ms, rows.previous_watermark_ms, rows.closed_ms)
    if any(time is not None and type(time) is not int for time in times) or type(rows.is_lost) is not bool:
        raise TypeError(f"{str(document)[:80]} are no rows set aside")
    for number in (rows.checkpoint_id, rows.rows, rows.size_bytes, len(rows.key_groups)):
        whole_number(number)
    return rows


def _former_slots_to_json(former: FormerSlots | None) -> dict[str, Any]:
    if former is None:
        return {}
    return {"former_slots": {"number": former.number, "published": former.published.to_text()}}


def _former_slots_from_json(document: dict[str, Any] | None) -> FormerSlots | None:
    if document is None:
        return None
    number = len(KeyGroupRange(0, whole_number(document["number"]) - 1))
    return FormerSlots(number, CheckpointRef.parse(document["published"]))


def group_by_object(handles: Iterable[SegmentHandle]) -> list[dict[str, Any]]:
    """Return the JSON form that `flatten_objects` reads; each object key is written once, since keys are long."""
    objects: dict[str, dict[str, Any]] = {}
    for handle in handles:
        group = objects.setdefault(
            handle.object_key, {"object": handle.object_key, "size": handle.object_size_bytes, "entries": []}
        )
        group["entries"].append(handle.entry.to_dict())
    return list(objects.values())


def flatten_objects(groups: Iterable[dict[str, Any]]) -> Iterator[SegmentHandle]:
    """Yield the handles given to `group_by_object`, grouped by object."""
    for group in groups:
        for entry in group["entries"]:
            yield SegmentHandle(group["object"], group["size"], SegmentEntry.from_dict(entry))


def object_keys(manifest: Manifest) -> set[str]:
    """Return the keys of all segment objects and materialization indexes that a manifest names."""
    note = (manifest.note,) if manifest.note is not None else ()
    keys = {handle.object_key for handles in (manifest.segments, manifest.earlier, note) for handle in handles}
    return keys | {handle.index_key for handle in manifest.materializations}
