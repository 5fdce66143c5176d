"""The guarantees of `ObjectStore` in stores that need no server, and their shared rules."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
from moto import mock_aws

from storage.errors import ConflictError, UnavailableError
from storage.local_store import LocalStore
from storage.memory_store import MemoryStore
from storage.object_store import ObjectData, ObjectStore, check_refused_put
from storage.s3_store import S3Store
from storage.testing import Fault, FaultKind, FaultyStore, RecordingStore
from tests.unit.storage.object_store_suite import ObjectStoreSuite, RaceSuite


class TestMemoryStore(ObjectStoreSuite, RaceSuite):
    """A dict."""

    @pytest.fixture
    def store(self) -> ObjectStore:
        """Return an empty store."""
        return MemoryStore()


class TestLocalStore(ObjectStoreSuite, RaceSuite):
    """A folder."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> ObjectStore:
        """Return an empty store."""
        return LocalStore(tmp_path / "base")


class TestS3Store(ObjectStoreSuite):
    """boto3 against an S3 imitation in this process, which is not atomic, so races run in tests/integration."""

    @pytest.fixture
    def store(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
        """Return an empty store."""
        for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
            monkeypatch.delenv(name, raising=False)
        with mock_aws():
            boto3.session.Session(region_name="us-east-1").client("s3").create_bucket(Bucket="bucket")
            yield S3Store("bucket", "some/prefix", region="us-east-1")


class TestDoubles(ObjectStoreSuite):
    """Unless scripted, the doubles change nothing."""

    @pytest.fixture
    def store(self) -> ObjectStore:
        """Return an empty store wrapped in both doubles."""
        return RecordingStore(FaultyStore(MemoryStore()))


class _NoConditions(MemoryStore):
    """A store that ignores `if_absent`, as some servers do."""

    def put(self, key: str, data: ObjectData, *, if_absent: bool = False) -> None:
        super().put(key, data)


def test_check_finds_ignored_condition() -> None:
    """I3: a store without create-if-absent is refused at the start, before it can lose a checkpoint."""
    store = _NoConditions()
    with pytest.raises(UnavailableError, match="ignores create-if-absent"):
        store.check_writable()
    assert list(store.list("")) == []


def test_refusal_by_vanished_object_is_unavailable() -> None:
    """If the refusing object was deleted since, the outcome is unknown, so the put is to be repeated."""
    with pytest.raises(UnavailableError, match="was then deleted"):
        check_refused_put(MemoryStore(), "k", b"x")


class _ReadInPieces(MemoryStore):
    """A store of objects that no host can hold as a whole."""

    def get(self, key: str) -> bytes:
        raise AssertionError(f"{key} is read as a whole")


def test_large_objects_are_compared_in_pieces() -> None:
    """A file that a sink publishes is larger than a task's memory; its put may be repeated, or find another file."""
    store, data = _ReadInPieces(), bytes(20 << 20)
    store.put("k", data)
    check_refused_put(store, "k", memoryview(data))
    for other in (data[:-1] + b"x", data[:-1], data + b"x"):
        with pytest.raises(ConflictError, match="other bytes"):
            check_refused_put(store, "k", [other[:10], other[10:]])


def test_put_succeeds_when_response_is_lost() -> None:
    """I5, I8: the second attempt finds the first one's object, whose response was lost, and succeeds."""
    store = FaultyStore(MemoryStore(), Fault("put", FaultKind.FAIL_AFTER))
    with pytest.raises(UnavailableError):
        store.put("k", b"bytes with a unique id", if_absent=True)
    store.put("k", b"bytes with a unique id", if_absent=True)
    with pytest.raises(ConflictError):
        store.put("k", b"bytes with another id", if_absent=True)
