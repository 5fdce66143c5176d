"""The guarantees of `ObjectStore` in boto3's store on a real S3 server."""

from __future__ import annotations

import io
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from botocore.awsrequest import AWSPreparedRequest

from storage.clock import SystemIds
from storage.errors import NotFoundError, UnavailableError
from storage.key_groups import KeyGroupRange
from storage.model import ChangeSetId, Segment, SegmentHandle, Writer
from storage.object_store import ObjectStore
from storage.open import open_store
from storage.s3_store import S3Store
from storage.segment_format import encode_object
from storage.segment_reader import read_segments
from tests.unit.storage.object_store_suite import ObjectStoreSuite, RaceSuite
from tests.waiting import wait_until
from tools.servers.s3_server import S3Server

pytestmark = pytest.mark.integration

_IDS = SystemIds()


@pytest.fixture
def bucket(s3_server: S3Server) -> str:
    """Return the name of a new bucket."""
    name = f"b-{_IDS.unique_id()}"
    s3_server.create_bucket(name)
    return name


def use(server: S3Server, patch: pytest.MonkeyPatch) -> None:
    """Let boto3 find the test's own server."""
    for name, value in server.env().items():
        patch.setenv(name, value)


class TestS3StoreOnServer(ObjectStoreSuite, RaceSuite):
    """The common suite, with a prefix."""

    @pytest.fixture
    def store(self, bucket: str) -> Iterator[ObjectStore]:
        """Return an empty store."""
        store = open_store(f"s3://{bucket}/some/prefix")
        yield store
        store.close()


def test_segment_is_read_by_ranges(bucket: str) -> None:
    """One segment of a 4 MiB object is read by ranges and verified."""
    store = open_store(f"s3://{bucket}")
    payloads = [bytes([number]) * 2**19 for number in range(8)]
    segments = [
        Segment.of(ChangeSetId("job", "op", 7, Writer(1, number), number, 0), KeyGroupRange(number, number), 1, payload)
        for number, payload in enumerate(payloads)
    ]
    buffers, entries = encode_object(segments)
    store.put("segments/host/1.seg", buffers)
    size = sum(len(buffer) for buffer in buffers)
    handle = SegmentHandle("segments/host/1.seg", size, entries[3])
    assert [bytes(payload) for _, payload in read_segments(store, [handle])] == [payloads[3]]


def test_list_pages_through_many_objects(bucket: str) -> None:
    """More objects than fit one page are all listed, once and in order."""
    store = open_store(f"s3://{bucket}")
    keys = [f"many/{number:05d}" for number in range(1_100)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: store.put(key, b""), keys))
    assert [info.key for info in store.list("many/")] == keys


@pytest.mark.usefixtures("s3_server")
def test_missing_bucket_is_said_by_check() -> None:
    """The check at the start names the missing bucket."""
    with pytest.raises(UnavailableError, match="bucket does not exist"):
        open_store("s3://no-such-bucket/x").check_writable()


def test_wrong_credentials_are_said_without_them(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a refused signature, the error names the remedy; the secret is in none of its texts."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "very-secret-thing")
    store = open_store(f"s3://{bucket}")
    with pytest.raises(UnavailableError, match="check the credentials") as caught:
        store.check_writable()
    assert "very-secret-thing" not in f"{caught.value!r} {caught.value} {store!r} {caught.value.to_dict()}"


def test_unknown_user_is_not_told_that_nothing_is_there(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """I11: to an access key that the server does not know, which it answers with 404, no object is absent."""
    open_store(f"s3://{bucket}").put("a", b"there")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody-knows-it")
    store = open_store(f"s3://{bucket}")
    for call in (lambda: store.get("a"), lambda: list(store.list("")), lambda: store.delete(["a"])):
        with pytest.raises(UnavailableError, match="check"):
            call()


def test_stopped_server_is_unavailable_then_recovers() -> None:
    """I5: while the server is down calls fail as retryable; after its restart, all acknowledged data are there."""
    with S3Server() as server, pytest.MonkeyPatch.context() as patch:
        use(server, patch)
        server.create_bucket("bucket")
        store = open_store("s3://bucket", attempts_max=1, connect_timeout_ms=500)
        store.put("k", b"acknowledged", if_absent=True)
        server.stop(signal.SIGKILL)
        for call in (lambda: store.put("k2", b"x"), lambda: store.get("k"), lambda: list(store.list(""))):
            with pytest.raises(UnavailableError, match=r"the connection to http\S+ failed; check the endpoint"):
                call()
        server.start()
        assert store.get("k") == b"acknowledged"
        with pytest.raises(NotFoundError):
            store.get("k2")


def test_silent_server_times_out() -> None:
    """A server that accepts the request and never answers holds a call no longer than the read time-out."""
    with S3Server() as server, pytest.MonkeyPatch.context() as patch:
        use(server, patch)
        server.create_bucket("bucket")
        store = open_store("s3://bucket", attempts_max=1, read_timeout_ms=300)
        server.pause()
        try:
            with pytest.raises(UnavailableError, match=r"the connection to http\S+ failed; check the endpoint"):
                store.get("k")
        finally:
            server.resume()
        wait_until(lambda: is_missing(store, "k"))  # 300 ms are short for a machine that has other work


def is_missing(store: ObjectStore, key: str) -> bool:
    """Return whether the store says that the object does not exist; False if it does not answer in time."""
    try:
        store.get(key)
    except NotFoundError:
        return True
    except UnavailableError:
        return False
    raise AssertionError(f"{key} is there")


def test_body_damaged_on_its_way_is_refused(bucket: str) -> None:
    """I10: the server checks the body against the signed checksum; a damaged body is sent again."""
    store = S3Store(bucket)

    def damage(request: AWSPreparedRequest, **_: object) -> None:
        request.body = io.BytesIO(b"Xayload")

    store._client.meta.events.register("before-send.s3.PutObject", damage)
    with pytest.raises(UnavailableError, match="damaged on their way"):
        store.put("key", b"payload")
    store._client.meta.events.unregister("before-send.s3.PutObject", damage)
    assert list(store.list("")) == []
    store.put("key", b"payload")

    assert store.get("key") == b"payload"
    store.close()
