"""The service's settings and how they must fit each other."""

from __future__ import annotations

from typing import Any

import pytest

from dstl_service.change_sets import BatchSettings
from dstl_service.settings import CacheSettings, GcSettings, ServiceSettings, UploadSettings, default_host_id
from storage.errors import InvalidInputError
from storage.model import validate_name

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
        ({"gc": {"age_min_s": 600}}, "gc.age_min_s"),
        ({"gc": {"interval_s": -1}}, "interval_s"),
        ({"checkpoint_timeout_s": 1800}, "gc.age_min_s"),
        ({"checkpoint_timeout_s": 3}, "checkpoint timeout"),
        ({"io_threads": 0}, "io_threads"),
        ({"shutdown_timeout_s": -1}, "shutdown_timeout_s"),
    ],
)
def test_values_that_do_not_fit_are_refused(settings: dict[str, Any], message: str) -> None:
    """A value that cannot be, or does not fit the others, stops the start with a message that names it."""
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
    assert ServiceSettings("memory://x", host=host, token_file="t").host == host
    assert ServiceSettings("memory://x", host=host, socket_path="s").host == host


def test_host_name_must_fit_keys() -> None:
    """A host id that cannot be part of an object key is refused."""
    with pytest.raises(InvalidInputError, match="host"):
        ServiceSettings("memory://x", host_id="a/b")


@pytest.mark.parametrize("name", ["plain", "with.domain.example", "-odd-", "ümlaut", "", "...", "x" * 300])
def test_default_host_id_is_legal(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a host is called, the default id fits into object keys."""
    monkeypatch.setattr("socket.gethostname", lambda: name)

    assert validate_name("host", default_host_id())
