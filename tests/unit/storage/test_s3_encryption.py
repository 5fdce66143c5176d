"""Server-side encryption of objects in S3, and the choice of a server: requests sent, and a server's reaction."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError
from moto import mock_aws

from storage.errors import InvalidInputError
from storage.s3_store import S3Store

KEY = bytes(range(32))


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Provide invalid credentials to boto3's default chain, and no server settings of this machine."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "access")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"sse": "AES256"}, ("AES256", None)),
        ({"sse": "aws:kms", "sse_kms_key_id": "key-1"}, ("aws:kms", "key-1")),
    ],
)
def test_objects_are_encrypted_as_set(options: dict[str, Any], expected: tuple[str, str | None]) -> None:
    """A server that supports encryption stores every object as set and returns it decrypted."""
    with mock_aws():
        client = boto3.client("s3", region_name="us-east-1")
        client.create_bucket(Bucket="bucket")
        store = S3Store("bucket", "p", region="us-east-1", **options)
        store.put("k", b"data", if_absent=True)
        found = client.head_object(Bucket="bucket", Key="p/k")

        assert (found["ServerSideEncryption"], found.get("SSEKMSKeyId")) == expected
        assert (store.get("k"), store.get_range("k", 1, 2), store.head("k").size_bytes) == (b"data", b"at", 4)
        store.close()


def text_of(value: bytes | str) -> str:
    return value.decode("ascii") if isinstance(value, bytes) else value


def sent_headers(store: S3Store) -> list[dict[str, str]]:
    """Send one request of each kind to a server that refuses all; return their headers."""
    found: list[dict[str, str]] = []

    def refuse(request: Any, **_: Any) -> None:
        found.append({name.lower(): text_of(value) for name, value in request.headers.items()})
        raise ClientError({"Error": {"Code": "AccessDenied"}}, "any")

    store._client.meta.events.register("before-send.s3", refuse)
    for call in (
        lambda: store.put("k", b"data"),
        lambda: store.get("k"),
        lambda: store.get_range("k", 0, 1),
        lambda: store.head("k"),
    ):
        with pytest.raises(Exception, match="access denied"):
            call()
    return found


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {}),
        ({"sse": "aws:kms"}, {"x-amz-server-side-encryption": "aws:kms"}),
        (
            {"sse": "aws:kms:dsse", "sse_kms_key_id": "key-1"},
            {
                "x-amz-server-side-encryption": "aws:kms:dsse",
                "x-amz-server-side-encryption-aws-kms-key-id": "key-1",
            },
        ),
    ],
)
def test_encryption_is_requested_when_writing(options: dict[str, Any], expected: dict[str, str]) -> None:
    """Without the setting the bucket decides; with it, every PUT names the encryption, and no GET does."""
    store = S3Store("bucket", region="us-east-1", **options)
    put, *others = sent_headers(store)

    assert {name: value for name, value in put.items() if "encryption" in name} == expected
    assert not any("encryption" in name for headers in others for name in headers)
    store.close()


def test_customer_key_goes_with_every_request(tmp_path: Path) -> None:
    """A customer's key is sent with reads and writes; it is in no text of the store."""
    path = tmp_path / "key"
    path.write_bytes(base64.b64encode(KEY) + b"\n")
    store = S3Store("bucket", region="us-east-1", sse_customer_key_file=path)
    requests = sent_headers(store)

    assert len(requests) == 4
    for headers in requests:
        assert headers["x-amz-server-side-encryption-customer-algorithm"] == "AES256"
        assert headers["x-amz-server-side-encryption-customer-key"] == base64.b64encode(KEY).decode()
        digest = base64.b64encode(hashlib.md5(KEY, usedforsecurity=False).digest()).decode()
        assert headers["x-amz-server-side-encryption-customer-key-md5"] == digest
    assert base64.b64encode(KEY).decode() not in repr(store)
    store.close()


@pytest.mark.parametrize("content", [None, b"", b"short", base64.b64encode(KEY[1:]), KEY])
def test_broken_customer_key_stops_start(content: bytes | None, tmp_path: Path) -> None:
    """A key file that is missing or has no key of the right length is refused before anything is written."""
    path = tmp_path / "key"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(InvalidInputError, match="32 bytes in base64"):
        S3Store("bucket", region="us-east-1", sse_customer_key_file=path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sse_kms_key_id": "key"}, "sse_kms_key_id needs"),
        ({"sse": "AES256", "sse_kms_key_id": "key"}, "sse_kms_key_id needs"),
        ({"sse": "AES256", "sse_customer_key_file": Path("key")}, "exclude each other"),
        ({"endpoint_url": "http://user:5ecret@host"}, "must not contain credentials"),
        ({"endpoint_url": "http://host/?key=5ecret"}, "must not contain credentials or a query"),
        ({"endpoint_url": "5ecret"}, r"it is http\(s\)://host:port"),
        ({"addressing_style": "5ecret"}, "must be one of path, virtual, auto"),
        ({"sse_customer_key_file": "5ecret/key=="}, "names no file that can be read"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    """Contradictory options are refused; a password in an address, or a key for its file, is not shown."""
    with pytest.raises(InvalidInputError, match=message) as caught:
        S3Store("bucket", region="us-east-1", **options)
    assert "5ecret" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "url"),
    [
        ({}, "https://bucket.s3.eu-central-1.amazonaws.com/k"),
        ({"addressing_style": "path"}, "https://s3.eu-central-1.amazonaws.com/bucket/k"),
        ({"endpoint_url": "http://host:9000"}, "http://host:9000/bucket/k"),
        ({"endpoint_url": "http://host:9000", "addressing_style": "virtual"}, "http://bucket.host:9000/k"),
    ],
)
def test_request_goes_to_the_configured_address(options: dict[str, Any], url: str) -> None:
    """Region, endpoint and addressing style determine the address; a custom endpoint has the bucket in the path."""
    store = S3Store("bucket", region="eu-central-1", **options)
    seen: list[str] = []

    def refuse(request: Any, **_: Any) -> None:
        seen.append(request.url)
        raise ClientError({"Error": {"Code": "AccessDenied"}}, "any")

    store._client.meta.events.register("before-send.s3", refuse)
    with pytest.raises(Exception, match="access denied"):
        store.head("k")

    assert seen == [url]
    store.close()
