"""The messages between client and service."""

from __future__ import annotations

import io
import json
import struct
from typing import Any

import pytest

from dstl_service.wire import (
    ChangeSetRef,
    CheckpointRef,
    EndFrame,
    ErrorFrame,
    FileFrame,
    GoneFrame,
    PersistRequest,
    PlanFrame,
    RestoreFrame,
    SegmentFrame,
    SetFrame,
    SnapshotFrame,
    decode_frames,
    encode_frame,
    read_frame,
    read_frames,
    to_json,
    write_frame,
)
from storage.errors import CorruptDataError, InvalidInputError
from storage.key_groups import KeyGroupRange

FRAMES: list[tuple[dict[str, Any], bytes]] = [
    ({"kind": "plan", "full": True}, b""),
    ({"kind": "segment", "object": "ü"}, bytes(range(256))),
    ({"kind": "end"}, b""),
]
STREAM = b"".join(b"".join(encode_frame(header, payload)) for header, payload in FRAMES)


def test_frames_survive_round_trip() -> None:
    """Headers and payloads are decoded unchanged, with the payload's size in the header."""
    decoded = list(decode_frames(io.BytesIO(STREAM)))

    assert [({**header, "size": len(payload)}, payload) for header, payload in FRAMES] == decoded


def test_stream_is_read_to_end_frame_only() -> None:
    """Bytes after the frame of kind end are not read."""
    stream = io.BytesIO(STREAM + b"more")
    list(decode_frames(stream))

    assert stream.read() == b"more"


def test_every_cut_of_stream_is_found() -> None:
    """I10: a stream that ends early at any position is an error, never a shorter restore."""
    for size in range(len(STREAM)):
        with pytest.raises(CorruptDataError):
            list(decode_frames(io.BytesIO(STREAM[:size])))


def framed(head: bytes, payload: bytes = b"") -> bytes:
    """Return a frame with any header."""
    return struct.pack(">I", len(head)) + head + payload


@pytest.mark.parametrize(
    "stream",
    [
        b"HTTP/1.1 200 OK and more text",
        framed(b"no json"),
        framed(b"[1]"),
        framed(b"{}"),
        framed(b'{"kind":"plan"}'),
        framed(b'{"size":0}'),
        framed(b'{"kind":"plan","size":"x"}'),
        framed(b'{"kind":"plan","size":-1}', b"rest"),
        framed(b"\xff\xfe"),
    ],
)
def test_other_stream_is_corrupt(stream: bytes) -> None:
    """A malformed stream is reported as damaged, whatever is wrong with it."""
    with pytest.raises(CorruptDataError):
        list(decode_frames(io.BytesIO(stream)))


RESTORE_FRAMES: list[RestoreFrame] = [
    PlanFrame(is_full=True, materialize=True, materialized={"uid": "u"}, snapshots=1, segments=2, size_bytes=3),
    SnapshotFrame("the.index", "1.0.u", KeyGroupRange(0, 9), (KeyGroupRange(2, 3), KeyGroupRange(5, 5)), 4),
    FileFrame("CURRENT", "the.object", 10, 20, "0" * 32),
    FileFrame("000008.sst", "the.object", 0, 20, "0" * 32, "/downloads/1"),
    SegmentFrame("7.seg", "0" * 16, KeyGroupRange(0, 9), (KeyGroupRange(0, 9),), 7, 1),
    SetFrame("a set", "0" * 16),
    ErrorFrame({"kind": "unavailable", "message": "store away", "context": {}}),
    GoneFrame(),
    EndFrame(),
]


def test_restore_frames_survive_round_trip() -> None:
    """A table reads a restore exactly as a service writes it, each kind of frame with its payload."""
    stream = b"".join(write_frame(frame, b"payload") for frame in RESTORE_FRAMES)

    assert list(read_frames(decode_frames(io.BytesIO(stream)))) == [(frame, b"payload") for frame in RESTORE_FRAMES]


@pytest.mark.parametrize(
    "header",
    [
        {"kind": "surprise"},
        {"kind": "plan"},
        {"kind": "error"},
        {"kind": "error", "error": "text"},
        {"kind": "snapshot", "index": "i"},
        {"kind": "file", "name": "CURRENT"},
        {"kind": "segment"},
        {"kind": "segment", "object": "7.seg", "checksum": "0", "first": 5, "last": 4, "counted": []},
        {"kind": "segment", "object": "7.seg", "checksum": "0", "first": 0, "last": 4, "counted": [[1]]},
    ],
)
def test_frame_that_says_too_little_is_corrupt(header: dict[str, Any]) -> None:
    """A frame of an unknown kind, or without a required field, is damage that names its kind, not a bug."""
    with pytest.raises(CorruptDataError, match=header["kind"]):
        read_frame(header)


def test_reference_survives_round_trip() -> None:
    """A checkpoint's reference survives the conversion to text."""
    ref = CheckpointRef(17, 3, "0af")

    assert CheckpointRef.parse(ref.to_text()) == ref


@pytest.mark.parametrize("text", ["", "1.2", "1.2.", "a.2.u", "1.-2.u", "1.2.u.v", " 1.2.u", "²", "².1.u", "1.2.u\n3"])
def test_other_reference_is_refused(text: str) -> None:
    """Text of another form is not a reference, and the message shows the form."""
    with pytest.raises(InvalidInputError, match="<id>"):
        CheckpointRef.parse(text)


def test_request_is_plain_json() -> None:
    """A request becomes a JSON document of its fields, at any depth."""
    ref = ChangeSetRef("op", 1, 2, 3, 4, 5, 6, "service")

    document = json.loads(to_json(PersistRequest(2, [ref])))

    assert document["wait"] is True
    assert ChangeSetRef(**document["refs"][0]) == ref


@pytest.mark.parametrize(
    "ref",
    [
        ChangeSetRef("op", 1, 2, 3, 4, 5, 6, "service"),
        ChangeSetRef("op", 1, 2, 3, 4, 5, 6, "service", "http://h:1/x", {"object": "ü", "size": 1}, "0" * 16),
    ],
)
def test_quick_json_is_that_of_all_fields(ref: ChangeSetRef) -> None:
    """The fast path to a reference's JSON omits no field and changes none."""
    assert ref.to_json() == to_json(ref)


def test_reference_names_change_set() -> None:
    """A reference and the job together identify a set."""
    set_id = ChangeSetRef("op", 1, 2, 3, 4, 5, 6, "service").change_set_id("job")

    assert set_id.to_dict() == {
        "job": "job",
        "operator": "op",
        "checkpoint": 1,
        "epoch": 2,
        "attempt": 3,
        "partition": 4,
        "sqn": 5,
    }


@pytest.mark.parametrize(
    "ref",
    [
        ChangeSetRef("op", 1, 2, 3, 4, 5, 6, "service"),
        ChangeSetRef("op", 1, 2, 3, 4, 5, 6, "service", 'http://h:1/"ü', {"object": 'k"', "size": 7}),
    ],
)
def test_ref_writes_itself(ref: ChangeSetRef) -> None:
    """A reference's own JSON equals that of any wire value."""
    assert json.loads(ref.to_json()) == json.loads(to_json(ref))
