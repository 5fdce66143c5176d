"""The commands on a store with a hostile writer: an error that names the object, and no control of the terminal."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dstl_service.cli import main
from dstl_service.collection.tombstones import Deletions
from dstl_service.formats.checkpoint_record import CheckpointRecord, decode_record, encode_record
from dstl_service.formats.checksummed_json import seal
from dstl_service.formats.manifest import ManifestKind, decode_manifest
from dstl_service.registry.job_store import JobStore
from dstl_service.wire import CheckpointRef
from storage.clock import SystemClock, SystemIds
from storage.errors import CorruptDataError, UnavailableError
from storage.local_store import LocalStore
from storage.testing import FakeIds, Fault, FaultKind, FaultyStore
from tests.unit.dstl_service.job_history import JobHistory

CLEAR = "\x1b[2J"
DEEP = b"[" * 100_000 + b"]" * 100_000
COMMANDS = [
    ["jobs"],
    ["checkpoints", "job"],
    ["gc", "job"],
    ["savepoints", "job"],
    ["fsck", "job"],
    ["fsck", "--rebuild", "job"],
    ["rewind", "--checkpoint", "0", "job"],
    ["audit", "job"],
    ["losses", "job"],
]
ENTRY: dict[str, Any] = {"at_ms": 1, "who": CLEAR, "act": "open\nforged", "job": "job", "facts": {CLEAR: CLEAR}}
TOMBSTONE: dict[str, Any] = {"job": "job", "uid": "u", "who": CLEAR, "at_ms": 10**15, "until_ms": 10**15}
STATE: dict[str, Any] = {"id": 0, "kind": "value", "schema": "{}"}
ROWS: dict[str, Any] = dict.fromkeys(("checkpoint_id", "first_key_group", "last_key_group", "rows", "size_bytes"), 0)
OPERATOR: dict[str, Any] = {"name": "op", "parallelism": 2, "key_schema": "{}", "states": {"count": STATE}}
MANIFEST_KEY = "job/checkpoints/00000000000000000000.000001.json"


@pytest.fixture
def store(tmp_path: Any) -> LocalStore:
    """Return a store with an opened job."""
    store = LocalStore(tmp_path)
    jobs = JobStore(store, "job", SystemClock(), SystemIds())
    jobs.open(16)
    jobs.claim("me")
    return store


def manifest(**changed: Any) -> bytes:
    """Return a manifest of a checkpoint with a valid checksum and other fields."""
    fields: dict[str, Any] = dict.fromkeys(("base", "note", "rewound_from"))
    fields |= {name: [] for name in ("operators", "segments", "earlier", "materializations")}
    fields |= {"format": 1, "kind": "complete", "job_uid": "u", "id": 0, "generation": 1, "uid": "m", "epoch": 1}
    return seal("manifest", fields | {"created_ms": 1, "query_id": CLEAR, "offsets": CLEAR} | changed)


@pytest.mark.parametrize(
    ("key", "data"),
    [
        ("@audit/job/1.json", json.dumps(ENTRY).encode()),
        ("@audit/job/1.json", json.dumps(ENTRY | {"at_ms": 10**30}).encode()),
        ("@audit/job/1.json", json.dumps(ENTRY | {"who": "\ud800"}).encode()),
        ("@audit/job/1.json", json.dumps(ENTRY | {"facts": [1]}).encode()),
        ("@audit/job/1.json", DEEP),
        ("@deleted/job.json", json.dumps(TOMBSTONE).encode()),
        ("@deleted/job.json", json.dumps(TOMBSTONE | {"at_ms": "x"}).encode()),
        ("@deleted/other.json", DEEP),
        ("job/job.json", DEEP),
        ("job/job.json", json.dumps({"format": 1, "uid": CLEAR, "max_parallelism": 16}).encode()),
        ("job/job.json", json.dumps({"format": 1, "uid": "u", "max_parallelism": 0}).encode()),
        ("job/epochs/00000000000000000001.json", DEEP),
        ("job/savepoints/a.json", DEEP),
        (MANIFEST_KEY, manifest(created_ms=10**15)),
        (MANIFEST_KEY, manifest(created_ms="x")),
        (MANIFEST_KEY, manifest(id=CLEAR)),
        (MANIFEST_KEY, manifest(epoch="7")),
        (MANIFEST_KEY, manifest(uid=CLEAR)),
    ],
)
def test_commands_survive_hostile_objects(
    store: LocalStore, key: str, data: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    """C14: every command ends with an exit code, and prints no control character from the store."""
    store.put(key, data)

    codes = [main([*command, "--storage", store.url]) for command in COMMANDS]

    shown = "".join(capsys.readouterr())
    assert set(codes) <= {0, 1, 2}
    assert shown.replace("\n", "").isprintable()
    assert "\nforged" not in shown


@pytest.mark.parametrize(
    "changed",
    [
        {"name": {}},
        {"name": CLEAR},
        {"parallelism": 0},
        {"parallelism": 10**12},
        {"parallelism": "2"},
        {"key_schema": None},
        {"states": {"count": STATE | {"id": "0"}}},
        {"states": {"count": STATE | {"schema": []}}},
        {"states": {"count": STATE | {"earlier": [1]}}},
        {"states": {"count": STATE | {"ttl_ms": 1.5}}},
        {"states": {"count": STATE | {"other": 1}}},
        {"kind": ["sink"]},
        {"kind": "sink", "published": []},
        {"set_aside": [ROWS | {"rows": "1"}]},
        {"set_aside": [ROWS | {"last_key_group": -1}]},
        {"set_aside": [ROWS | {"closed_ms": "1"}]},
        {"set_aside": [ROWS | {"is_lost": 1}]},
        {"called": 1.5},
        {"renamed_from": {}},
        {"recent": [1]},
    ],
)
def test_operator_of_wrong_types_is_damaged(
    store: LocalStore, changed: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """A forged operator with a valid checksum is reported with its manifest; no reader meets it in another place."""
    assert decode_manifest(manifest(operators=[OPERATOR | {"set_aside": [ROWS]}]), "key").operators
    store.put(MANIFEST_KEY, manifest(operators=[OPERATOR | changed]))

    assert main(["checkpoints", "job", "--storage", store.url]) == 2

    assert f"manifest {MANIFEST_KEY} cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize("base", ["0.1.m", "1.1.m", "0.2.n"])
def test_bases_lead_to_an_end(store: LocalStore, base: str, capsys: pytest.CaptureFixture[str]) -> None:
    """C36: a manifest whose base is not before it is damaged: its readers would go round in a circle for ever."""
    store.put(MANIFEST_KEY, manifest(kind="delta", base=base))

    assert [main([*command, "--storage", store.url]) for command in (["checkpoints", "job"], ["fsck", "job"])] == [2, 1]

    assert f"its base {base} is not before it" in "".join(capsys.readouterr())
    record = encode_record(CheckpointRecord("job", "u", 16, 0, (), uid="m", epoch=1, base=CheckpointRef.parse(base)))
    with pytest.raises(CorruptDataError, match="is not before it"):
        decode_record(record, "note")


@pytest.mark.parametrize("number", ["-5", "1e999", "1e9", "1" + "0" * 4000, "1" + "0" * 20, "1000", '"1"', "true"])
def test_wrong_hint_changes_nothing(number: str) -> None:
    """The newest epoch and the savepoints are found without their hints, whatever these hold."""
    history = JobHistory()
    history.complete(history.object(0), kind=ManifestKind.COMPLETE)
    history.jobs.make_savepoint("kept", None)
    for name in ("epoch", "savepoints", "swept"):
        history.store.put(f"job/hints/{name}.json", f"[{number}]".encode())

    later = JobStore(history.store, "job", history.clock, FakeIds(1))
    later.open(None)

    assert [name for name, _ in later.savepoints.all()] == ["kept"]
    assert later.frontier()[1] == history.epoch
    history.collect()
    assert later.savepoints.load("kept").segments


@pytest.mark.parametrize(
    "changed", [{"id": "x"}, {"epoch": 1.5}, {"created_ms": None}, {"offsets": 1}, {"uid": "../m"}]
)
def test_manifest_of_wrong_types_is_damaged(changed: dict[str, Any]) -> None:
    """A manifest with a valid checksum and a field of another type is as damaged as one with other bytes."""
    with pytest.raises(CorruptDataError, match="cannot be read"):
        decode_manifest(manifest(**changed), "key")


def test_hostile_tombstone_is_an_error_with_its_key(store: LocalStore) -> None:
    """A tombstone with an invalid job name is damaged: it leads to no other place of the store."""
    store.put("@deleted/job.json", json.dumps(TOMBSTONE | {"uid": "../x"}).encode())

    with pytest.raises(CorruptDataError, match=r"@deleted/job\.json"):
        Deletions(store, SystemClock(), SystemIds()).of("job")


def test_damaged_tombstone_keeps_no_other_job(store: LocalStore) -> None:
    """C14: an unreadable tombstone does not prevent the collection of other deleted jobs (I12)."""
    deletions = Deletions(store, SystemClock(), SystemIds())
    deletions.bury("job", "me", 0)
    for key in ("@deleted/a.json", "@deleted/z.json"):
        store.put(key, DEEP)

    assert [removal.job for removal in deletions.collect_expired()] == ["job"]


def test_tombstone_that_is_out_of_reach_is_not_damaged(store: LocalStore) -> None:
    """If the store does not answer for a tombstone, it is read again later; no message asks to remove the object."""
    Deletions(store, SystemClock(), SystemIds()).bury("job", "me", 0)
    faulty = FaultyStore(store)
    faulty.inject(Fault("get", FaultKind.FAIL_BEFORE))

    with pytest.raises(UnavailableError):
        list(Deletions(faulty, SystemClock(), SystemIds()).all(pytest.fail))
