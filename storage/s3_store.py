"""
Objects in a bucket of S3 or of a compatible server.

The server must have conditional PUT (`If-None-Match: *`); `check_writable` tests that. General purpose buckets
list keys in ascending order; "directory buckets" do not and cannot be used.
Timeouts and retries are the caller's policy, so botocore itself hardly retries.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any

from botocore import exceptions as boto
from botocore.config import Config

from storage.clock import IdSource, SystemIds
from storage.errors import DstlError, InternalError, InvalidInputError, UnavailableError
from storage.model import ObjectInfo
from storage.object_store import (
    PROBE_FOLDER,
    ObjectData,
    buffers_of,
    check_range_size,
    check_refused_put,
    check_whole_size,
    in_order,
    joined,
    probe,
    validate_key,
    validate_prefix,
    validate_range,
)
from storage.s3_body import BufferedBody
from storage.s3_errors import FOREIGN, LOOK_UP, is_redirected, meaning
from storage.s3_session import new_session
from storage.validation import is_endpoint

_KEYS_PER_DELETE_MAX = 1000
_CUSTOMER_KEY_BYTES = 32
_STREAMED_BYTES_MIN = 2**20
_ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")

_NO_ENDPOINT = (
    "the endpoint must not contain credentials or a query: it is http(s)://host:port; use boto3's default chain for "
    "credentials"
)
_STYLES = ("path", "virtual", "auto")

_REFUSED = ("409", "412")
_OPEN = "open"

_CREDENTIALS_ERRORS = (
    boto.NoCredentialsError,
    boto.PartialCredentialsError,
    boto.CredentialRetrievalError,
    boto.SSOError,
    boto.TokenRetrievalError,
)

_CONNECTION_ERRORS = (
    boto.ConnectionError,
    boto.HTTPClientError,
    boto.IncompleteReadError,
    boto.FlexibleChecksumError,
)


class S3Store:
    """
    A store in a bucket.

    Credentials come from boto3's default chain (environment, profile, web identity, instance) and are never kept,
    shown or logged here.

    Args:
        bucket: Name of an existing bucket.
        prefix: Prepended to every key; "" or parts joined by '/'.
        endpoint_url: Server to use instead of AWS, without credentials; AWS_ENDPOINT_URL_S3 by default.
        region: Region of the bucket; boto3's default if None.
        ca_file: CA certificates that verify the server; botocore's if None.
        sse: Server-side encryption, "AES256", "aws:kms" or "aws:kms:dsse"; the bucket's default if None.
        sse_kms_key_id: Key for "aws:kms".
        sse_customer_key_file: File with a key of 32 bytes in base64 (SSE-C); excludes `sse`.
        connections_max: Size of the connection pool; at least the number of threads that use the store at once, those
            of late uploads included, or connections are reopened for every request.
        attempts_max: Total tries of a request, at least 1; a body that breaks off is requested again at once.
        connect_timeout_ms: Longest wait for a connection.
        read_timeout_ms: Longest silence of the server; bounds how long a hung call holds its thread.
        addressing_style: "path", "virtual" or "auto"; by default "path" for a custom endpoint, else "auto".
        ids: Names of probe objects.

    Raises:
        InvalidInputError: An option is wrong.
    """

    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        *,
        endpoint_url: str | None = None,
        region: str | None = None,
        ca_file: os.PathLike[str] | None = None,
        sse: str | None = None,
        sse_kms_key_id: str | None = None,
        sse_customer_key_file: os.PathLike[str] | None = None,
        connections_max: int = 32,
        attempts_max: int = 2,
        connect_timeout_ms: int = 5_000,
        read_timeout_ms: int = 15_000,
        addressing_style: str | None = None,
        ids: IdSource | None = None,
    ) -> None:
        self._bucket = bucket
        self._prefix = f"{validate_key(prefix)}/" if prefix else ""
        self._ids = ids or SystemIds()
        self._attempts_max = attempts_max
        self._customer_key, self._encryption = _encryption(sse, sse_kms_key_id, sse_customer_key_file)
        own_endpoint = endpoint_url or next(filter(None, map(os.environ.get, _ENDPOINT_VARIABLES)), None)
        _check_options(own_endpoint, addressing_style)
        s3_options: Any = {
            "addressing_style": addressing_style or ("path" if own_endpoint else "auto"),
            # The signature covers the CRC of the body, as in botocore over TLS. Over plain HTTP botocore would also
            # sign a SHA-256 of the body, which takes half of the time of a PUT; use TLS where forgery is a risk.
            "payload_signing_enabled": False,
        }
        config = Config(
            max_pool_connections=connections_max,
            connect_timeout=connect_timeout_ms / 1000,
            read_timeout=read_timeout_ms / 1000,
            retries={"total_max_attempts": attempts_max, "mode": "standard"},
            s3=s3_options,
            tcp_keepalive=True,
        )
        with self._translated(_OPEN, ""):
            session = new_session(region)
            self._client: Any = session.client(
                "s3", endpoint_url=endpoint_url, config=config, verify=None if ca_file is None else os.fspath(ca_file)
            )
        _check_options(self._client.meta.endpoint_url, None)  # which boto3 also takes from its files

    def __repr__(self) -> str:
        return f"S3Store({self.url!r})"

    @property
    def url(self) -> str:
        """The bucket and prefix as an `s3` URL; without the endpoint."""
        return f"s3://{self._bucket}/{self._prefix.rstrip('/')}".rstrip("/")

    def put(self, key: str, data: ObjectData, *, if_absent: bool = False) -> None:
        """Send one PUT, with `If-None-Match: *` for `if_absent`."""
        place = self._place(key)
        buffers = buffers_of(data)
        # For a file, botocore first asks the server to accept it, which costs more than a copy of a small body.
        is_small = sum(len(buffer) for buffer in buffers) < _STREAMED_BYTES_MIN
        body: Any = joined(data) if is_small or isinstance(data, bytes) else BufferedBody(buffers)
        condition = {"IfNoneMatch": "*"} if if_absent else {}
        try:
            with self._translated("write", key):
                answer = self._client.put_object(**place, **condition, **self._encryption, Body=body)
                self._check_answer("write", key, answer, "ETag")
        except UnavailableError as error:
            if not if_absent or error.context.get("status") not in _REFUSED:
                raise
            check_refused_put(self, key, data)

    def get(self, key: str) -> bytes:
        """Send one GET, and another one if its body breaks off."""
        return self._download(key, {})

    def get_range(self, key: str, offset: int, size: int) -> bytes:
        """Send one GET with a range, and another one if its body breaks off; none for an empty range."""
        validate_range(offset, size)
        if size == 0:
            return b""
        data = self._download(key, {"Range": f"bytes={offset}-{offset + size - 1}"})
        return check_range_size(key, data, offset, size)

    def head(self, key: str) -> ObjectInfo:
        """Send one HEAD."""
        place = self._place(key)
        with self._translated(LOOK_UP, key):
            found = self._client.head_object(**place, **self._customer_key)
            self._check_answer(LOOK_UP, key, found, "ETag")
        return ObjectInfo(key, found["ContentLength"], int(found["LastModified"].timestamp() * 1000))

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        """Send one LIST per 1000 keys, lazily."""
        validate_prefix(prefix)
        return in_order(self._pages(prefix, start_after), start_after)

    def delete(self, keys: Iterable[str]) -> None:
        """Send one batch delete per 1000 keys."""
        remaining = iter(keys)
        while batch := [self._prefix + validate_key(key) for key in islice(remaining, _KEYS_PER_DELETE_MAX)]:
            wanted = {"Objects": [{"Key": key} for key in batch], "Quiet": True}
            with self._translated("delete", batch[0]):
                answer = self._client.delete_objects(Bucket=self._bucket, Delete=wanted)
            for failure in answer.get("Errors", ()):
                code = str(failure.get("Code", ""))
                if code not in ("NoSuchKey", "404"):
                    raise self._error("delete", str(failure.get("Key", "")), code, "500")

    def check_writable(self, folder: str = PROBE_FOLDER) -> None:
        """Try all operations, conditional PUT among them."""
        probe(self, self._ids.unique_id(), folder)

    def close(self) -> None:
        """Close the connection pool."""
        self._client.close()

    def _download(self, key: str, options: Mapping[str, str]) -> bytes:
        place = self._place(key)
        attempts_left = self._attempts_max
        with self._translated("read", key):
            while True:
                attempts_left -= 1
                # botocore retries requests, but not a body that breaks off.
                repeated = (*_CONNECTION_ERRORS, OSError) if attempts_left > 0 else ()
                answer = self._client.get_object(**place, **self._customer_key, **options)
                self._check_answer("read", key, answer, "ETag")
                # As a context manager, a body returns urllib3's stream, which checks neither length nor checksum.
                with closing(answer["Body"]) as body, suppress(*repeated):
                    check_whole_size(key, answer.get("ContentLength", 0))
                    data: bytes = body.read()
                    return data

    def _place(self, key: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._prefix + validate_key(key)}

    def _pages(self, prefix: str, start_after: str) -> Iterator[ObjectInfo]:
        place = {"Bucket": self._bucket, "Prefix": self._prefix + prefix}
        if start_after:
            place["StartAfter"] = self._prefix + start_after
        pages = iter(self._client.get_paginator("list_objects_v2").paginate(**place))
        while True:
            with self._translated("list", prefix):
                page = next(pages, None)
            if page is None:
                return
            self._check_answer("list", prefix, page, "IsTruncated")
            for item in page.get("Contents", ()):
                key = item["Key"].removeprefix(self._prefix)
                yield ObjectInfo(key, item["Size"], int(item["LastModified"].timestamp() * 1000))
            if page["IsTruncated"]:  # without a token, botocore takes the page for the last one
                self._check_answer("list", prefix, page, "NextContinuationToken")

    @contextmanager
    def _translated(self, verb: str, key: str) -> Iterator[None]:
        """Translate boto3's exceptions into errors of this project."""
        try:
            yield
        except boto.ClientError as error:
            answer: Mapping[str, Any] = error.response
            code = str(answer.get("Error", {}).get("Code", ""))
            status = str(answer.get("ResponseMetadata", {}).get("HTTPStatusCode", ""))
            raise self._error(verb, key, code, status) from error
        except (boto.ParamValidationError, boto.InvalidRegionError) as error:
            raise InvalidInputError(f"cannot {verb} {key}: {error}", key=key) from error
        except _CREDENTIALS_ERRORS as error:
            raise UnavailableError(
                f"cannot {verb} {key or self.url}: boto3 found no usable credentials; set AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY, a profile or a role for the process that starts the sidecar, or sign in again "
                "(`aws sso login`)",
                key=key,
                store=self.url,
            ) from error
        except boto.NoRegionError as error:
            raise InvalidInputError(f"cannot {verb} {self.url}: set the option region, or AWS_REGION") from error
        except (*_CONNECTION_ERRORS, OSError, RecursionError) as error:
            if is_redirected(error):
                raise self._error(verb, key, "", "301") from error
            # Refused, reset and silent connections, and truncated or damaged answers.
            raise UnavailableError(
                f"cannot {verb} {key or self.url}: the connection to {self._client.meta.endpoint_url} failed; check "
                "the endpoint and the network",
                key=key,
                store=self.url,
                cause=type(error).__name__,
            ) from error
        except boto.BotoCoreError as error:
            if verb == _OPEN:  # no request yet: what boto3 reads on this host is wrong
                raise InvalidInputError(f"cannot open {self.url}: {error}; check AWS_PROFILE and ~/.aws") from error
            raise InternalError(
                f"cannot {verb} {key}: unexpected error of botocore", key=key, cause=type(error).__name__
            ) from error
        except ValueError as error:
            # botocore checks endpoint URLs with bare ValueErrors.
            if isinstance(error, DstlError):
                raise
            if verb == _OPEN:  # the error quotes what is no endpoint
                raise InvalidInputError(f"cannot open {self.url}: {_NO_ENDPOINT}") from None
            raise InvalidInputError(f"cannot {verb} {self.url}: {error}") from error

    def _check_answer(self, verb: str, key: str, answer: Mapping[str, Any], field: str) -> None:
        """Raise `UnavailableError` for an answer of status 200 that lacks a field that every S3 server sends."""
        if field not in answer:
            raise UnavailableError(f"cannot {verb} {key or self.url}: {FOREIGN}", key=key, store=self.url)

    def _error(self, verb: str, key: str, code: str, status: str) -> DstlError:
        error_class, advice = meaning(verb, code, status)
        message = f"cannot {verb} {key or self.url}: {advice}"
        return error_class(message, key=key, store=self.url, code=code, status=status)


def _check_options(endpoint: str | None, addressing_style: str | None) -> None:
    """Raise `InvalidInputError` for an endpoint or a style that is none, without the value: it may be a secret."""
    if endpoint and not is_endpoint(endpoint):
        raise InvalidInputError(_NO_ENDPOINT)
    if addressing_style not in (None, *_STYLES):
        raise InvalidInputError(f"addressing_style of an S3 store must be one of {', '.join(_STYLES)}")


def _encryption(
    sse: str | None, kms_key_id: str | None, customer_key_file: os.PathLike[str] | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the parameters of requests that read objects, and of those that write them."""
    if kms_key_id is not None and not (sse or "").startswith("aws:kms"):
        raise InvalidInputError("sse_kms_key_id needs sse aws:kms or aws:kms:dsse")
    if customer_key_file is not None and sse is not None:
        raise InvalidInputError("sse and sse_customer_key_file exclude each other; set only one")
    customer_key = _customer_key(customer_key_file) if customer_key_file is not None else {}
    encryption = {
        **({} if sse is None else {"ServerSideEncryption": sse}),
        **({} if kms_key_id is None else {"SSEKMSKeyId": kms_key_id}),
        **customer_key,
    }
    return customer_key, encryption


def _customer_key(path: os.PathLike[str]) -> dict[str, Any]:
    """Return the parameters of SSE-C with the key of a file; botocore adds the key's checksum."""
    try:
        key = base64.b64decode(Path(path).read_text("ascii").strip(), validate=True)
    except (OSError, ValueError):
        key = b""
    if len(key) != _CUSTOMER_KEY_BYTES:
        place = os.fspath(path) if os.path.exists(path) else "names no file that can be read; it"  # maybe it is the key
        raise InvalidInputError(f"sse_customer_key_file {place} must contain a key of 32 bytes in base64")
    return {"SSECustomerAlgorithm": "AES256", "SSECustomerKey": key}
