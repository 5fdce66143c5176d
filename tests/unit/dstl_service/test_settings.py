"""The service's settings and where they come from."""

from __future__ import annotations

from pathlib import Path

import pytest

from dstl_service.settings import ServiceSettings, default_host_id, with_environment
from storage.errors import InvalidInputError
from storage.model import validate_name
from storage.retry_policy import RetryPolicy

SETTINGS = ServiceSettings("memory://x", host_id="host")


def test_defaults_are_those_of_design() -> None:
    """The defaults are the documented ones."""
    assert (SETTINGS.batch.delay_ms, SETTINGS.batch.size_bytes) == (10, 10 << 20)
    assert SETTINGS.batch.in_flight_bytes_max == 100 << 20
    assert SETTINGS.retry == RetryPolicy(1_000, 3, 500)
    assert SETTINGS.upload_threads == 5


def test_environment_changes_settings() -> None:
    """Every group of settings can be changed by a variable; what no variable names stays."""
    changed = with_environment(
        SETTINGS,
        {"DSTL_BATCH_DELAY_MS": "0", "DSTL_UPLOAD_ATTEMPTS_MAX": "2", "DSTL_IO_THREADS": "3", "OTHER": "x"},
    )

    assert (changed.batch.delay_ms, changed.retry.attempts_max, changed.io_threads) == (0, 2, 3)
    assert changed.batch.size_bytes == SETTINGS.batch.size_bytes
    assert changed.retry.timeout_ms == SETTINGS.retry.timeout_ms


def test_process_environment_is_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a mapping, the variables are those of the process."""
    monkeypatch.setenv("DSTL_UPLOAD_THREADS", "9")

    assert with_environment(SETTINGS).upload_threads == 9


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("DSTL_BATCH_SIZE_BYTES", "10MB", "DSTL_BATCH_SIZE_BYTES must be a whole number"),
        ("DSTL_BATCH_SIZE_BYTES", "", "whole number"),
        ("DSTL_BATCH_SIZE_BYTES", str(200 << 20), "in_flight_bytes_max"),
        ("DSTL_IN_FLIGHT_BYTES_MAX", "5", "in_flight_bytes_max"),
        ("DSTL_UPLOAD_TIMEOUT_MS", "200000", "checkpoint timeout"),
        ("DSTL_UPLOAD_ATTEMPTS_MAX", "0", "attempts_max"),
        ("DSTL_UPLOAD_THREADS", "0", "upload_threads"),
        ("DSTL_IO_THREADS", "0", "io_threads"),
        ("DSTL_CACHE_BYTES_MAX", "-1", "cache_bytes_max"),
        ("DSTL_SHUTDOWN_TIMEOUT_S", "-1", "shutdown_timeout_s"),
    ],
)
def test_impossible_variable_is_refused(variable: str, value: str, message: str) -> None:
    """A value that cannot be, or does not fit the others, stops the start with a message that names it."""
    with pytest.raises(InvalidInputError, match=message):
        with_environment(SETTINGS, {variable: value})


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


def test_token_is_read_without_line_end(tmp_path: Path) -> None:
    """The token is the file's text without white space around it."""
    path = tmp_path / "token"
    path.write_text("secret\n", encoding="utf-8")

    assert ServiceSettings("memory://x", token_file=str(path)).token() == "secret"
    assert SETTINGS.token() is None


@pytest.mark.parametrize("content", [None, "", " \n"])
def test_missing_token_is_refused(content: str | None, tmp_path: Path) -> None:
    """A token file that is missing or empty stops the start; it never means "no token"."""
    path = tmp_path / "token"
    if content is not None:
        path.write_text(content, encoding="utf-8")

    with pytest.raises(InvalidInputError, match="token file"):
        ServiceSettings("memory://x", token_file=str(path)).token()
