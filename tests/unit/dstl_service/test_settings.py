"""The service's settings, and which of them fit together."""

from __future__ import annotations

import inspect
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from dstl_service.access.certificates import TlsSettings
from dstl_service.intake.change_sets import BatchSettings
from dstl_service.settings import (
    CacheSettings,
    GcSettings,
    S3Settings,
    ServiceSettings,
    default_host_id,
)
from dstl_service.uploads.settings import UploadSettings
from storage.errors import InvalidInputError
from storage.s3_store import S3Store
from storage.validation import validate_name

SETTINGS = ServiceSettings("memory://x", host_id="host")


def test_defaults_are_those_of_design() -> None:
    """The defaults are the documented ones."""
    assert (SETTINGS.batch.delay_ms, SETTINGS.batch.size_bytes) == (10, 10 << 20)
    assert SETTINGS.batch.in_flight_bytes_max == 100 << 20
    assert SETTINGS.upload == UploadSettings(1_000, 3, 500, threads=5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch": {"size_bytes": 200 << 20}}, "in_flight_bytes_max"),
        ({"batch": {"in_flight_bytes_max": 5}}, "in_flight_bytes_max"),
        ({"upload": {"timeout_ms": 200_000}}, "checkpoint timeout"),
        ({"upload": {"attempts_max": 0}}, "attempts_max"),
        ({"upload": {"threads": 0}}, "threads"),
        ({"cache": {"bytes_max": -1}}, "bytes_max"),
        ({"gc": {"age_min_s": -1}}, "age_min_s"),
        ({"gc": {"interval_s": -1}}, "interval_s"),
        ({"checkpoint_timeout_s": 3}, "checkpoint timeout"),
        ({"io_threads": 0}, "io_threads"),
        ({"shutdown_timeout_s": -1}, "shutdown_timeout_s"),
    ],
)
def test_values_that_do_not_fit_are_refused(settings: dict[str, Any], message: str) -> None:
    """An invalid value, or one that does not fit the others, stops the start with a message that names it."""
    groups = {"batch": BatchSettings, "upload": UploadSettings, "cache": CacheSettings, "gc": GcSettings}
    with pytest.raises(InvalidInputError, match=message):
        ServiceSettings(
            "memory://x",
            **{name: groups[name](**value) if name in groups else value for name, value in settings.items()},
        )


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1"])
def test_open_address_needs_token(host: str) -> None:
    """A service that other hosts can reach does not start without a token."""
    with pytest.raises(InvalidInputError, match="token"):
        ServiceSettings("memory://x", host=host)
    assert ServiceSettings("memory://x", host=host, token_file=Path("t")).host == host
    assert ServiceSettings("memory://x", host=host, socket_path=Path("s")).host == host


def test_host_name_must_fit_keys() -> None:
    """A host id that cannot be part of an object key is refused."""
    with pytest.raises(InvalidInputError, match="host"):
        ServiceSettings("memory://x", host_id="a/b")


@pytest.mark.parametrize("name", ["plain", "with.domain.example", "-odd-", "ümlaut", "", "...", "x" * 300])
def test_default_host_id_is_legal(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a host's name, the default id fits into object keys."""
    monkeypatch.setattr("socket.gethostname", lambda: name)

    assert validate_name("host", default_host_id())


def test_token_needs_one_source() -> None:
    """A token and a token file exclude each other; either lets a service listen on any address."""
    with pytest.raises(InvalidInputError, match="give one of them"):
        ServiceSettings("memory://x", token="t", token_file=Path("t"))
    assert ServiceSettings("memory://x", host="10.0.0.1", token="t").host == "10.0.0.1"


def test_settings_show_no_secret() -> None:
    """The text of settings, as in a log or a traceback, contains no token."""
    assert "5ecret" not in repr(ServiceSettings("memory://x", token="5ecret"))


@pytest.mark.parametrize(
    "url", ["ftp://host", "http://user:5ecret@host:1", "http://host?x=1", "host:80", "http://", "file:///etc/passwd"]
)
def test_advertised_address_is_checked(url: str) -> None:
    """The address for other services is an HTTP address without a user; a password in it is not repeated."""
    with pytest.raises(InvalidInputError, match="advertised_url must be") as caught:
        ServiceSettings("memory://x", advertised_url=url)
    assert "5ecret" not in str(caught.value)


@pytest.mark.parametrize("url", ["http://host:1", "https://h.example", "http://[::1]:8000", "https://h/prefix"])
def test_usual_advertised_address_is_taken(url: str) -> None:
    """Names, IPv6 addresses and a path of a proxy are valid."""
    assert ServiceSettings("memory://x", advertised_url=url).advertised_url == url


def test_socket_has_no_advertised_address() -> None:
    """A service on a Unix socket listens on no TCP address, so it cannot advertise one."""
    with pytest.raises(InvalidInputError, match="advertised_url is for TCP"):
        ServiceSettings("memory://x", socket_path=Path("s"), advertised_url="http://host:1")


def test_tls_files_must_be_there(tmp_path: Path) -> None:
    """An unreadable certificate, a key without one, and TLS on a Unix socket are refused at the start."""
    path = tmp_path / "a.pem"
    with pytest.raises(InvalidInputError, match="cannot be read"):
        TlsSettings(certificate_file=path)
    path.touch()
    with pytest.raises(InvalidInputError, match=r"without tls.certificate_file"):
        TlsSettings(key_file=path)
    with pytest.raises(InvalidInputError, match="tls is for TCP"):
        ServiceSettings("memory://x", socket_path=Path("s"), tls=TlsSettings(certificate_file=path))


def test_options_go_to_stores_of_s3_only() -> None:
    """A store of S3 gets its settings, and a connection for every thread; other stores get nothing."""
    s3 = S3Settings(region="eu-central-1", sse="aws:kms", sse_kms_key_id="key")
    upload = UploadSettings(threads=4, attempts_max=2)
    cache = CacheSettings(parts_ahead=2)
    options = ServiceSettings("s3://bucket/p", s3=s3, upload=upload, cache=cache, io_threads=3).store_options()

    assert (options["region"], options["sse"], options["sse_kms_key_id"]) == ("eu-central-1", "aws:kms", "key")
    assert options["connections_max"] == 19 + 8
    assert "endpoint_url" not in options
    assert ServiceSettings("s3://bucket", s3=S3Settings(connections_max=7)).store_options()["connections_max"] == 7
    assert ServiceSettings("file:///s", s3=s3).store_options() == {}


def test_every_s3_setting_is_an_option_of_the_store() -> None:
    """The settings are the options of the S3 store, under the same names."""
    parameters = inspect.signature(S3Store).parameters

    assert {item.name for item in fields(S3Settings)} <= parameters.keys()
