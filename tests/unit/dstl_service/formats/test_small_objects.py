"""Small objects: ``job.json``, records of epochs, tombstones, and entries of the register of savepoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from dstl_service.formats.checksummed_json import stamp, unstamp
from dstl_service.formats.keys import EpochRecord, JobRecord, Place, Rewind, decode_job, encode_job
from dstl_service.formats.tombstone import Tombstone
from dstl_service.registry.savepoint_register import Registered
from dstl_service.wire import CheckpointRef, ForkOrigin
from storage.errors import CorruptDataError

TOMBSTONE = Tombstone("job", "uid", "ann", 1_700_000_000_000, 1_700_604_800_000, 2, 1)
EPOCH = EpochRecord(4, "rewind", "uid", 1_700_000_000_000, 1, Place(0, 7, 2), Place(0, 8, 1), Rewind("before", 3, 0))
ORIGIN = ForkOrigin("parent", 1, CheckpointRef(20, 0, "theirs"), "fork-at-20", 64)
REGISTERED = Registered(frozenset({"a@1", "b@2"}), frozenset({"a@1"}), frozenset({"c@3"}))
DECODERS: dict[str, tuple[bytes, Callable[[bytes], Any], type[Exception]]] = {
    "job": (encode_job("uid", 128), lambda data: decode_job(data, "job.json"), CorruptDataError),
    "fork": (encode_job("uid", 128, ORIGIN), lambda data: decode_job(data, "job.json"), CorruptDataError),
    "epoch": (EPOCH.encode(), lambda data: EpochRecord.decode(data, "epoch"), CorruptDataError),
    "tombstone": (TOMBSTONE.encode(), lambda data: Tombstone.decode(data, TOMBSTONE.key), CorruptDataError),
    "register": (REGISTERED.encode(), Registered.decode, ValueError),
}


@pytest.mark.parametrize("kind", DECODERS)
def test_no_flipped_bit_changes_what_an_object_says(kind: str) -> None:
    """I10: a flipped digit of max_parallelism would have all keys looked for in wrong key groups, without an error."""
    data, decode, damage = DECODERS[kind]
    sound = decode(data)
    for at in range(len(data)):
        for bit in range(8):
            try:
                found = decode(bytes([*data[:at], data[at] ^ 1 << bit, *data[at + 1 :]]))
            except damage:
                continue
            assert found == sound
    for size in range(len(data)):
        with pytest.raises(damage):
            decode(data[:size])


@pytest.mark.parametrize("kind", DECODERS)
def test_objects_of_earlier_versions_have_no_checksum(kind: str) -> None:
    """They are read as before, and earlier versions find all that they read in those of this one."""
    data, decode, _ = DECODERS[kind]
    document = json.loads(data)
    assert list(document)[-1] == "checksum"
    del document["checksum"]
    assert decode(json.dumps(document).encode()) == decode(data)
    assert stamp(document) == data
    assert unstamp(data) == document


def test_tombstone_under_another_key_is_damaged() -> None:
    """I11: if it counted, a collection would delete the objects of the job that it names."""
    for key in ("@deleted/other.json", "@deleted/job.json", "@deleted/job@2.json"):
        with pytest.raises(CorruptDataError, match=key):
            Tombstone.decode(TOMBSTONE.encode(), key)


def test_damaged_job_is_named() -> None:
    """The error says which object it is; the job is that of the golden record."""
    damaged = encode_job("uid", 128).replace(b"128", b"129")
    with pytest.raises(CorruptDataError, match=r"job/job\.json cannot be read: the checksum does not match"):
        decode_job(damaged, "job/job.json")
    assert decode_job(encode_job("uid", 128), "") == JobRecord("uid", 128)


@pytest.mark.parametrize(
    ("kind", "value"), [("job", '"max_parallelism": 1e999'), ("job", '"origin": 1.5'), ("epoch", '"latest_id": 1e999')]
)
def test_values_of_other_kinds_are_damage(kind: str, value: str) -> None:
    """A number without end, or of a wrong type, is reported like any other damage; fsck goes on."""
    data, decode, damage = DECODERS[kind]
    document = {**json.loads(data), **json.loads(f"{{{value}}}")}
    del document["checksum"]
    with pytest.raises(damage, match="cannot be read"):
        decode(json.dumps(document).encode())
