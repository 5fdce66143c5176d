"""Opening stores by URL."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from storage.errors import InvalidInputError
from storage.local_store import LocalStore
from storage.open import is_same_storage, open_store


def test_url_opens_the_same_store_again(tmp_path: Path) -> None:
    """A store's URL opens it again, also with a space and a percent sign in the path."""
    first = open_store((tmp_path / "a b%20").as_uri())
    assert isinstance(first, LocalStore)
    first.put("k", b"x")
    assert open_store(first.url).get("k") == b"x"


def test_memory_url_opens_shared_store() -> None:
    """One store per name and process."""
    open_store("memory://opened-by-test").put("k", b"x")
    assert open_store("memory://opened-by-test").get("k") == b"x"


@pytest.mark.parametrize("url", ["s3://bucket", "s3://bucket/some/prefix"])
def test_s3_url_is_read_back(url: str) -> None:
    """The URL gives bucket and prefix; no connection is opened yet."""
    store = open_store(url, region="eu-central-1", endpoint_url="http://127.0.0.1:9")
    assert store.url == url
    assert open_store(f"{url}/", region="eu-central-1").url == url


@pytest.mark.parametrize(
    "url",
    ["", "/a/b", "ftp://x/y", "file://host/x", "file:relative", "s3://", "memory://", "memory://a/b", "s3://b/p?x=1"],
)
def test_unknown_url_lists_known_ones(url: str) -> None:
    """The error for a mistyped URL lists the valid schemes."""
    with pytest.raises(InvalidInputError, match="file:///absolute/path, s3://bucket/prefix, memory://name"):
        open_store(url)


@pytest.mark.parametrize(
    "url", ["s3://k:s3cret@b/p", "s3://k:p/s3cret@b/p", "s3://k:p/s3cret", "s3a://k:s3cret@b", "s3:k:s3cret@b/p"]
)
def test_credentials_in_a_url_are_not_told(url: str) -> None:
    """A URL with some is refused; a password with a / would otherwise become the prefix in the store's name."""
    with pytest.raises(InvalidInputError, match="credentials") as refused:
        open_store(url)
    assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "meant"),
    [
        ("/data/state", "Did you mean file:///data/state?"),
        ("file://data/state", "Did you mean file:///data/state?"),
        ("file:data/state", "Did you mean file:///data/state?"),
        ("s3a://bucket/prefix", "Did you mean s3://bucket/prefix?"),
    ],
)
def test_common_mistake_gets_the_url_that_was_meant(url: str, meant: str) -> None:
    """A plain path, a missing slash, and Hadoop's name of a bucket are answered with the URL to write."""
    with pytest.raises(InvalidInputError, match=re.escape(meant)):
        open_store(url)


def test_credentials_in_url_are_refused_unseen() -> None:
    """URLs are logged, so neither a URL nor an error about one may contain a secret."""
    with pytest.raises(InvalidInputError) as caught:
        open_store("s3://key:hunter2@bucket/x")
    assert "hunter2" not in repr(caught.value)
    with pytest.raises(InvalidInputError) as caught:
        open_store("s3://bucket", endpoint_url="http://key:hunter2@host")
    assert "hunter2" not in repr(caught.value)


def test_unknown_option_lists_known_ones() -> None:
    """A mistyped option is an error, not ignored."""
    with pytest.raises(InvalidInputError, match=r"unknown store options regoin; known are .*region"):
        open_store("s3://bucket", regoin="x")


def test_missing_boto3_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without boto3 other stores work, and this one names the package to install."""
    for name in ("storage.s3_store", "storage.s3_session"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(InvalidInputError, match="boto3"):
        open_store("s3://bucket")


def test_same_storage_in_other_words(tmp_path: Path) -> None:
    """Slashes, links and an omitted host do not matter; bucket, prefix and kind do."""
    (tmp_path / "a b").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a b")
    url = (tmp_path / "a b").as_uri()

    assert is_same_storage(url, (tmp_path / "link").as_uri() + "/")
    assert is_same_storage(url, url.replace("file://", "file://localhost"))
    assert is_same_storage("s3://bucket/prefix", "s3://bucket/prefix/")
    assert not is_same_storage("s3://bucket/prefix", "s3://bucket/prefix/more")
    assert not is_same_storage("s3://bucket", "s3://other")
    assert not is_same_storage("s3://bucket", url)
