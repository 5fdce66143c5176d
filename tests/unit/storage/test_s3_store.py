"""How a server's answers become errors of this project, tested without a server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from botocore.exceptions import (
    ClientError,
    EndpointConnectionError,
    HTTPClientError,
    NoCredentialsError,
    ReadTimeoutError,
    UnauthorizedSSOTokenError,
)
from botocore.loaders import JSONFileLoader
from botocore.stub import Stubber

from storage.errors import (
    ConflictError,
    CorruptDataError,
    DstlError,
    InvalidInputError,
    NotFoundError,
    UnavailableError,
)
from storage.s3_session import shared_loader
from storage.s3_store import S3Store

FOUND = {"ETag": '"1"'}


class _Body:
    """A response body."""

    def __init__(self, data: bytes, error: Exception | None = None) -> None:
        self._data = data
        self._error = error

    def close(self) -> None:
        """Do nothing."""

    def read(self) -> bytes:
        """Return the data, or fail partway."""
        if self._error is not None:
            raise self._error
        return self._data


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> S3Store:
    """Return a store with known credentials."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "known-access")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "known-secret")
    return S3Store("bucket", "p", region="us-east-1", sse="aws:kms", sse_kms_key_id="key-1")


def test_descriptions_of_s3_are_read_once(store: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening a second store reads no description of S3 again; the list of their folders does not grow."""
    read = list[str]()
    load_file = JSONFileLoader.load_file

    def counted(self: JSONFileLoader, file_path: str) -> Any:
        read.append(file_path)
        return load_file(self, file_path)

    folders = shared_loader(None).search_paths
    monkeypatch.setattr(JSONFileLoader, "load_file", counted)
    for _ in range(3):
        assert S3Store("other", region="eu-west-1").url == "s3://other"
    assert read == []
    assert shared_loader(None).search_paths == folders


@pytest.fixture
def server(store: S3Store) -> Iterator[Stubber]:
    """Script the server's answers; all of them must be used."""
    with Stubber(store._client) as stubber:
        yield stubber
        stubber.assert_no_pending_responses()


@pytest.mark.parametrize(
    ("code", "status", "error_class"),
    [
        ("NoSuchKey", 404, NotFoundError),
        ("NotFound", 404, NotFoundError),
        ("404", 404, UnavailableError),
        ("", 404, UnavailableError),
        ("XAdminUserNotFound", 404, UnavailableError),
        ("NoSuchBucket", 404, UnavailableError),
        ("AccessDenied", 403, UnavailableError),
        ("403", 403, UnavailableError),
        ("ExpiredToken", 400, UnavailableError),
        ("RequestTimeout", 400, UnavailableError),
        ("SlowDown", 503, UnavailableError),
        ("TooManyRequests", 429, UnavailableError),
        ("InternalError", 500, UnavailableError),
        ("", 502, UnavailableError),
        ("PermanentRedirect", 301, UnavailableError),
        ("InvalidRange", 416, CorruptDataError),
        ("EntityTooLarge", 400, InvalidInputError),
        ("Unheard-of", 418, InvalidInputError),
        ("NotImplemented", 501, InvalidInputError),
    ],
)
def test_answer_becomes_error(
    store: S3Store, server: Stubber, code: str, status: int, error_class: type[DstlError]
) -> None:
    """The code, then the status, then its hundred determine the class; the error names the key and hides the secret."""
    server.add_client_error("get_object", service_error_code=code, http_status_code=status)
    with pytest.raises(error_class) as caught:
        store.get("a/b")
    assert type(caught.value) is error_class
    assert caught.value.context == {"key": "a/b", "store": "s3://bucket/p", "code": code, "status": str(status)}
    assert "known-secret" not in f"{caught.value} {store!r}"


def test_object_of_any_size_is_not_read_at_once(store: S3Store, server: Stubber) -> None:
    """Another writer of the bucket may put five terabytes under a document's key; they would take all memory."""
    body = _Body(b"", AssertionError("it is read"))
    server.add_response("get_object", {**FOUND, "Body": body, "ContentLength": 5 << 40})

    with pytest.raises(CorruptDataError, match="none of its kind has more than"):
        store.get("a/b")


def test_missing_object_is_told_from_a_missing_server(store: S3Store, server: Stubber) -> None:
    """I11: deletions rely on absence. Only a HEAD has no body with S3's code; for others a bare 404 is a proxy's."""
    server.add_client_error("head_object", service_error_code="404", http_status_code=404)
    with pytest.raises(NotFoundError):
        store.head("a/b")
    server.add_client_error("get_object", service_error_code="404", http_status_code=404)
    with pytest.raises(UnavailableError, match="not that of an S3 server"):
        store.get("a/b")


def test_missing_object_is_told_from_an_unknown_user(store: S3Store, server: Stubber) -> None:
    """I11: a server that answers 404 to a user that it does not know says nothing of what is stored."""
    for call in ("get_object", "list_objects_v2", "delete_objects"):
        server.add_client_error(call, service_error_code="XAdminUserNotFound", http_status_code=404)
    with pytest.raises(UnavailableError, match="check credentials"):
        store.get("a/b")
    with pytest.raises(UnavailableError, match="check credentials"):
        list(store.list(""))
    with pytest.raises(UnavailableError, match="check credentials"):
        store.delete(["a/b"])


@pytest.mark.parametrize("status", [409, 412])
@pytest.mark.parametrize(("found", "outcome"), [(b"mine", None), (b"other", ConflictError)])
def test_refused_put_reads_then_decides(
    store: S3Store, server: Stubber, status: int, found: bytes, outcome: type[DstlError] | None
) -> None:
    """I5: after 412 and 409 the store reads again: the same bytes are its own PUT whose response was lost."""
    server.add_client_error("put_object", service_error_code="Refused", http_status_code=status)
    server.add_response("get_object", {**FOUND, "Body": _Body(found)}, {"Bucket": "bucket", "Key": "p/k"})
    if outcome is None:
        store.put("k", b"mine", if_absent=True)
    else:
        with pytest.raises(outcome):
            store.put("k", b"mine", if_absent=True)


def test_refused_put_of_vanished_object_is_unavailable(store: S3Store, server: Stubber) -> None:
    """After a 409 due to a concurrent request, with no object there, the put is to be repeated."""
    server.add_client_error("put_object", service_error_code="ConditionalRequestConflict", http_status_code=409)
    server.add_client_error("get_object", service_error_code="NoSuchKey", http_status_code=404)
    with pytest.raises(UnavailableError, match="was then deleted"):
        store.put("k", b"mine", if_absent=True)


def test_put_sends_condition_and_encryption(store: S3Store, server: Stubber) -> None:
    """I3: the server checks the condition, in the same request as the bytes."""
    expected: dict[str, Any] = {
        "Bucket": "bucket",
        "Key": "p/k",
        "Body": b"xy",
        "IfNoneMatch": "*",
        "ServerSideEncryption": "aws:kms",
        "SSEKMSKeyId": "key-1",
    }
    server.add_response("put_object", FOUND, expected)
    store.put("k", [b"x", b"y"], if_absent=True)
    del expected["IfNoneMatch"]
    server.add_response("put_object", FOUND, expected)
    store.put("k", b"xy")


def test_short_range_is_corrupt(store: S3Store, server: Stubber) -> None:
    """I10: if the object ends within a range, the error names the object."""
    expected = {"Bucket": "bucket", "Key": "p/k", "Range": "bytes=5-14"}
    server.add_response("get_object", {**FOUND, "Body": _Body(b"short")}, expected)
    with pytest.raises(CorruptDataError, match="object k is damaged"):
        store.get_range("k", 5, 10)


@pytest.mark.parametrize(
    "error",
    [
        ReadTimeoutError(endpoint_url="http://h"),
        EndpointConnectionError(endpoint_url="http://h"),
        ConnectionResetError(),
    ],
)
def test_connection_lost_within_body_is_unavailable(store: S3Store, server: Stubber, error: Exception) -> None:
    """A connection that fails again within a body makes a retryable error."""
    server.add_response("get_object", {**FOUND, "Body": _Body(b"", error)})
    server.add_response("get_object", {**FOUND, "Body": _Body(b"", error)})
    with pytest.raises(UnavailableError, match=r"the connection to https?://\S+ failed; check the endpoint"):
        store.get("k")


def test_body_that_breaks_off_is_fetched_again(store: S3Store, server: Stubber) -> None:
    """The store retries a body that broke off once, because botocore retries requests only."""
    server.add_response("get_object", {**FOUND, "Body": _Body(b"", ReadTimeoutError(endpoint_url="http://h"))})
    server.add_response("get_object", {**FOUND, "Body": _Body(b"whole")})
    assert store.get("k") == b"whole"


def test_failed_key_of_batch_delete_is_an_error(store: S3Store, server: Stubber) -> None:
    """A batch delete answers 200 and lists failures; a missing key is not a failure."""
    missing = {"Key": "p/a", "Code": "NoSuchKey", "Message": "m"}
    server.add_response("delete_objects", {"Errors": [missing]})
    store.delete(["a"])
    server.add_response("delete_objects", {"Errors": [missing, {"Key": "p/b", "Code": "AccessDenied", "Message": "m"}]})
    with pytest.raises(UnavailableError, match="cannot delete p/b: access denied"):
        store.delete(["a", "b"])


def test_answer_that_is_no_listing_is_no_empty_one(store: S3Store, server: Stubber) -> None:
    """I11: deletions rely on listings, so an answer that is not one, such as a proxy's page, is an error."""
    item = {"Key": "p/a", "Size": 1, "LastModified": datetime(2026, 1, 1, tzinfo=UTC)}
    server.add_response("list_objects_v2", {"IsTruncated": True, "NextContinuationToken": "x", "Contents": [item]})
    server.add_response("list_objects_v2", {})
    found = store.list("")

    assert next(found).key == "a"
    with pytest.raises(UnavailableError, match="not that of an S3 server"):
        next(found)


def test_listing_that_breaks_off_is_not_at_its_end(store: S3Store, server: Stubber) -> None:
    """I11: a server that says there is more, and not where, has not listed all: botocore takes it for the end."""
    item = {"Key": "p/a", "Size": 1, "LastModified": datetime(2026, 1, 1, tzinfo=UTC)}
    server.add_response("list_objects_v2", {"IsTruncated": True, "Contents": [item]})

    with pytest.raises(UnavailableError, match="not that of an S3 server"):
        list(store.list(""))


@pytest.mark.parametrize(("start_after", "keys"), [("", ["a", "c", "b"]), ("", ["a", "a"]), ("b", ["a", "c"])])
def test_listing_out_of_order_is_refused(store: S3Store, server: Stubber, start_after: str, keys: list[str]) -> None:
    """A server that sorts otherwise, or ignores where a listing begins, must not tell which object is the last."""
    found = [{"Key": f"p/{key}", "Size": 1, "LastModified": datetime(2026, 1, 1, tzinfo=UTC)} for key in keys]
    server.add_response("list_objects_v2", {"IsTruncated": False, "Contents": found})

    with pytest.raises(UnavailableError, match="keys must ascend"):
        list(store.list("", start_after=start_after))


@pytest.mark.parametrize(
    ("operation", "call"),
    [
        ("put_object", lambda store: store.put("k", b"x", if_absent=True)),
        ("head_object", lambda store: store.head("k")),
        ("get_object", lambda store: store.get("k")),
    ],
    ids=["put", "head", "get"],
)
def test_answer_of_a_proxy_is_no_success(
    store: S3Store, server: Stubber, operation: str, call: Callable[[S3Store], object]
) -> None:
    """I5: a put is acknowledged only if an S3 server answered with the ETag of the stored bytes."""
    server.add_response(operation, {})
    with pytest.raises(UnavailableError, match="not that of an S3 server"):
        call(store)


@pytest.mark.parametrize("error", [RecursionError(), HTTPClientError(error=RecursionError())])
def test_redirection_by_a_proxy_is_said(store: S3Store, error: Exception) -> None:
    """Such as from http to https: botocore asks for the bucket's region, is redirected again, and gives up so."""
    with pytest.raises(UnavailableError, match="redirected the request"), store._translated("list", ""):
        raise error


def test_missing_credentials_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without credentials the first call raises an error that says so."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    with pytest.raises(UnavailableError, match="no usable credentials"):
        S3Store("bucket", region="us-east-1").get("k")


@pytest.mark.parametrize("error", [NoCredentialsError(), UnauthorizedSSOTokenError()])
def test_session_that_has_ended_is_no_bug(store: S3Store, error: Exception) -> None:
    """A person who signed in yesterday is told to sign in again."""
    with pytest.raises(UnavailableError, match="sign in again"), store._translated("list", ""):
        raise error


def test_unknown_profile_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """What boto3 reads on this host is wrong, which is no bug: the error names the store and the profile."""
    monkeypatch.setenv("AWS_PROFILE", "mistyped")
    with pytest.raises(InvalidInputError, match=r"cannot open s3://bucket/p: .*\(mistyped\) .*check AWS_PROFILE"):
        S3Store("bucket", "p", region="us-east-1")


@pytest.mark.parametrize("options", [{"endpoint_url": "no url"}, {"region": "not a region!"}])
def test_bad_option_is_refused(options: dict[str, Any]) -> None:
    """An invalid option is refused at the start."""
    with pytest.raises(InvalidInputError):
        S3Store("bucket", **{"region": "us-east-1", **options})


def test_endpoint_of_the_environment_has_no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """An endpoint with a password is refused wherever it comes from; the error does not repeat it."""
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://user:5ecret@127.0.0.1:1")
    with pytest.raises(InvalidInputError, match="endpoint must not contain credentials") as refused:
        S3Store("bucket", region="us-east-1")
    assert "5ecret" not in str(refused.value)


def test_client_error_without_fields_is_translated(store: S3Store) -> None:
    """An answer without code and status still becomes a project error."""
    with pytest.raises(DstlError), store._translated("read", "k"):
        raise ClientError({}, "GetObject")
