"""Manifests as bytes, and the log that a chain of them describes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from dstl_service.formats.manifest import (
    COMPLETE_EVERY,
    Manifest,
    ManifestKind,
    decode_manifest,
    encode_manifest,
    is_complete_due,
    operators_from_json,
    operators_to_json,
    select_handles,
    state_up_to,
)
from dstl_service.wire import SET_ASIDE, CheckpointRef, FormerSlots, OperatorInfo, RowsSetAside, StateInfo
from storage.checksum import checksum64
from storage.errors import CorruptDataError, NewerFormatError
from storage.key_groups import KeyGroupRange
from storage.model import MaterializationHandle
from tests.unit.dstl_service.samples import handles_of, manifest, segment

HANDLES = handles_of([segment(0), segment(1)])
OTHERS = handles_of([segment(2)], "job/segments/other/2.seg")
SNAPSHOT = MaterializationHandle("op", KeyGroupRange(0, 9), 3, "uid", "job/materialized/op/uid.json", 1 << 40)


@pytest.mark.parametrize(
    "original",
    [
        manifest(),
        manifest(20, 4, CheckpointRef(19, 1, "b"), segments=HANDLES, earlier=OTHERS, kind=ManifestKind.COMPLETE),
        manifest(3, 4, CheckpointRef(2, 0, "b"), segments=[*HANDLES, *OTHERS]),
        replace(manifest(kind=ManifestKind.FENCE), operators=(), query_id="", offsets=""),
        replace(manifest(), closed_ms=0),
        replace(
            manifest(),
            operators=(
                OperatorInfo(
                    "op.rows",
                    2,
                    "{}",
                    {},
                    kind=SET_ASIDE,
                    set_aside=[RowsSetAside(3, 0, 9, 5, 70), RowsSetAside(4, 0, 9, 0, 0, 7, 6, 5, 8, is_lost=True)],
                ),
            ),
        ),
        replace(manifest(), offsets='a "quoted"\n,"manifest":{ text'),
        replace(manifest(kind=ManifestKind.COMPLETE), materializations=(SNAPSHOT,), note=OTHERS[0]),
    ],
)
def test_manifest_survives_round_trip(original: Manifest) -> None:
    """A manifest survives encoding and decoding unchanged."""
    assert decode_manifest(encode_manifest(original), "key") == original


def test_mixed_objects_lose_no_handle() -> None:
    """A manifest names each object once, and still returns every handle of interleaved objects."""
    mixed = [HANDLES[0], *OTHERS, HANDLES[1]]
    data = encode_manifest(manifest(segments=mixed))

    assert set(decode_manifest(data, "key").segments) == set(mixed)
    assert data.count(HANDLES[0].object_key.encode()) == 1


def test_every_flipped_bit_is_found() -> None:
    """I10: no single flipped bit of a manifest goes undetected; the error names the object."""
    data = encode_manifest(manifest(segments=HANDLES[:1]))
    for position in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[position] ^= 1 << bit
            with pytest.raises(CorruptDataError, match="the-key"):
                decode_manifest(bytes(damaged), "the-key")


def test_every_cut_is_found() -> None:
    """I10: a manifest whose end is missing is an error, wherever it is cut."""
    data = encode_manifest(manifest(segments=HANDLES))
    for size in range(len(data)):
        with pytest.raises(CorruptDataError):
            decode_manifest(data[:size], "key")


@pytest.mark.parametrize("tail", [b"}", b" ", b"\x00", b'{"a":1}'])
def test_bytes_after_end_are_found(tail: bytes) -> None:
    """I10: bytes after a manifest's end are an error."""
    with pytest.raises(CorruptDataError):
        decode_manifest(encode_manifest(manifest()) + tail, "key")


def rewritten(**changes: object) -> bytes:
    """Return a manifest with other fields and a checksum that fits."""
    document = json.loads(encode_manifest(manifest(segments=HANDLES)))["manifest"]
    body = json.dumps({**document, **changes}).encode()
    return b'{"checksum":"%016x","manifest":%s}' % (checksum64(body), body)


def test_newer_format_is_refused() -> None:
    """A manifest of a newer program is not interpreted; the message says which format this program reads."""
    with pytest.raises(NewerFormatError, match=r"manifest key was written by a newer version .* 2 is newer than 1"):
        decode_manifest(rewritten(format=2), "key")


@pytest.mark.parametrize(
    "changes",
    [
        {"format": "1"},
        {"kind": "strange"},
        {"base": "nonsense"},
        {"operators": [{}]},
        {"operators": [{"name": "op", "parallelism": 1, "key_schema": "", "states": []}]},
        {"segments": [{"object": "k", "size": 1, "entries": [{}]}]},
        {"segments": 3},
    ],
)
def test_strange_content_is_corrupt(changes: dict[str, object]) -> None:
    """I10: a document that is not a manifest is reported as damaged, although its checksum fits."""
    with pytest.raises(CorruptDataError, match="key"):
        decode_manifest(rewritten(**changes), "key")


def test_every_twentieth_manifest_is_complete() -> None:
    """The first manifest and every 20th one are complete, so a restore reads few of them."""
    assert [number for number in range(61) if is_complete_due(number)] == [0, 20, 40, 60]
    assert COMPLETE_EVERY == 20


def test_log_begins_with_earlier_handles() -> None:
    """The log is the complete manifest's earlier handles, then each manifest's own, oldest first."""
    one, two, three = handles_of([segment(0), segment(1), segment(2)])
    complete = manifest(20, base=CheckpointRef(19, 0, "b"), kind=ManifestKind.COMPLETE, earlier=[one], segments=[two])
    delta = manifest(21, base=complete.ref, segments=[three])

    assert state_up_to([delta, complete]).log == [one, two, three]


def test_log_may_begin_at_first_checkpoint() -> None:
    """A chain that reaches the job's first checkpoint needs no complete manifest."""
    assert state_up_to([manifest(segments=HANDLES)]).log == HANDLES


def test_broken_chain_is_corrupt() -> None:
    """A broken chain is an error, never a shorter log."""
    with pytest.raises(CorruptDataError, match="breaks off at checkpoint 7"):
        state_up_to([manifest(8), manifest(7, base=CheckpointRef(6, 0, "b"))])


def test_handles_are_selected_in_order() -> None:
    """Changes of one partition are ordered by checkpoint, then by sequence number, whatever order names them."""
    sets = [segment(sqn, checkpoint_id=checkpoint_id) for checkpoint_id in (1, 2, 10) for sqn in (0, 1, 2, 11)]
    handles = handles_of(sets)

    assert select_handles(reversed(handles), "op", KeyGroupRange(0, 9)) == handles


def test_only_wanted_handles_are_selected() -> None:
    """Handles of other operators or key groups are left out; a range that overlaps at its edge is included."""
    sets = [segment(partition=partition) for partition in range(3)] + [segment(operator="other")]

    selected = select_handles(handles_of(sets), "op", KeyGroupRange(9, 10))

    assert [handle.entry.id for handle in selected] == [sets[0].id, sets[1].id]


def test_info_sums_up_manifest() -> None:
    """A listing shows the count and the bytes of the checkpoint's additions."""
    info = manifest(3, base=CheckpointRef(2, 0, "b"), segments=HANDLES, earlier=OTHERS).info()

    assert (info.segments, info.segment_bytes, info.base) == (2, 20, CheckpointRef(2, 0, "b"))


def test_states_without_history_are_written_as_before() -> None:
    """I15: states that never changed are written as before schemas had a history, and such manifests are read."""
    operator = OperatorInfo("op", 1, "{}", {"a": StateInfo(1, "value", "{}")})
    (document,) = operators_to_json([operator])

    assert document["states"]["a"] == {"id": 1, "kind": "value", "schema": "{}"}
    assert operators_from_json([document]) == (operator,)


def test_operators_without_modes_are_written_as_before() -> None:
    """I15: an operator keeps its modes and names; one without them is written as before, and is read."""
    before = OperatorInfo("op", 1, "{}", {})
    since = replace(before, time_mode="EventTime", output_mode="Append", kind="columns")
    renamed = replace(before, called="other", renamed_from="former")
    sink = replace(before, kind="sink", recent=[CheckpointRef(7, 3_000_000, "b"), CheckpointRef(8, 3_000_001, "c")])
    fewer = replace(sink, former_slots=FormerSlots(4, sink.recent[0]))

    documents = operators_to_json([before, since, renamed, sink, fewer])

    assert documents[0].keys() == {"name", "parallelism", "key_schema", "states"}
    assert documents[3]["recent"] == ["7.3000000.b", "8.3000001.c"]
    assert documents[4] == {**documents[3], "former_slots": {"number": 4, "published": "7.3000000.b"}}
    assert operators_from_json(documents) == (before, since, renamed, sink, fewer)
