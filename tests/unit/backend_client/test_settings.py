"""The user's settings."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import pytest

from backend_client.settings import BackendSettings
from storage.errors import InvalidInputError


def test_options_become_settings() -> None:
    """Options are set by name; the others have their defaults."""
    settings = BackendSettings.of("file:///s", "job", {"parallelism": 4})

    assert (settings.parallelism, settings.preemptive_bytes, settings.service) == (4, 5 << 20, None)


def test_settings_travel_to_tasks() -> None:
    """Settings are equal after their transfer to another process, because clients are cached by them."""
    settings = BackendSettings.of("s3://bucket/p", "job", {"local_dir": "/l"})

    assert pickle.loads(pickle.dumps(settings)) == settings
    assert len({settings, pickle.loads(pickle.dumps(settings))}) == 1


def test_changes_of_operators_are_compared_whatever_their_form() -> None:
    """As a mapping, or as the lists of a JSON document, they are the same settings, which hash."""
    given = {"renamed": {"b": "c", "a": "d"}, "removed": ["y", "x"]}
    read = {"renamed": [["a", "d"], ["b", "c"]], "removed": ("x", "y")}

    assert len({BackendSettings.of("file:///s", "job", options) for options in (given, read)}) == 1


@pytest.mark.parametrize(
    ("option", "hint"),
    [("paralelism", "did you mean 'parallelism'"), ("localdir", "'local_dir'"), ("zzz", "Known options")],
)
def test_unknown_option_gets_hint(option: str, hint: str) -> None:
    """A misspelled option is refused with the nearest name and a list of all names."""
    with pytest.raises(InvalidInputError, match=hint) as raised:
        BackendSettings.of("file:///s", "job", {option: 1})
    assert "max_parallelism" in str(raised.value)


@pytest.mark.parametrize("option", ["storage", "job"])
def test_arguments_are_not_options(option: str) -> None:
    """A setting with its own argument is not an option."""
    with pytest.raises(InvalidInputError, match="unknown option"):
        BackendSettings.of("file:///s", "job", {option: "x"})


@pytest.mark.parametrize(
    "values",
    [
        {"storage": "/plain/path"},
        {"renamed": {"a": "b", "b": "a"}},
        {"renamed": {"a": "c", "b": "c"}},
        {"renamed": {"a": "a"}},
        {"renamed": {"a": "b/c"}},
        {"renamed": {"a": "b"}, "removed": ["a"]},
        {"renamed": 3},
        {"removed": "name"},
        {"removed": None},
        {"storage": "memory://x"},
        {"storage": "file://relative/path"},
        {"storage": "s3://"},
        {"storage": Path("/plain/path")},
        {"storage": ""},
        {"job": "a/b"},
        {"job": ""},
        {"service": "host:80"},
        {"service": "unix://relative"},
        {"preemptive_bytes": 0},
        {"batch_tries_max": 0},
        {"patience_s": -1},
        {"checkpoint_timeout_s": 0},
        {"local_idle_s": 0},
        {"local_idle_s": 1.5},
        {"failover": "fast"},
        {"failover_patience_s": 0},
        {"max_stall_s": 0},
        {"max_deferred_bytes": 1.5},
        {"max_lost_fraction": 0},
        {"max_lost_fraction": 1.1},
        {"lost_rows": "drop"},
        {"local_dir": "relative"},
        {"service": "http://host:70710"},
        {"service": "http://host:port"},
        {"service": "http://host:7071/path"},
        {"service": "http://:7071"},
        {"local_dir": 5},
        {"sidecar_idle_exit_s": "600"},
        {"sidecar_idle_exit_s": -1},
        {"parallelism": 0},
        {"parallelism": "4"},
        {"parallelism": 2.5},
        {"parallelism": 2.0},
        {"max_parallelism": 128.0},
        {"max_parallelism": 32_769},
        {"patience_s": "60"},
        {"batch_tries_max": 2.5},
        {"preemptive_bytes": 1e6},
        {"service": 7071},
        {"token_file": 5},
        {"trusted_uids": 1000},
        {"trusted_dir": ["/run/dstl"]},
        {"fork_location": True},
        {"links": "false"},
        {"links": 0},
    ],
)
def test_impossible_value_is_refused(values: dict[str, Any]) -> None:
    """An invalid value is refused where it is set, on the driver."""
    with pytest.raises(InvalidInputError):
        BackendSettings(**{"storage": "file:///s", "job": "job", **values})


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"patience_s": 0}, "patience_s must be a number above 0 and at most 1000000000, not 0"),
        ({"patience_s": float("inf")}, "patience_s must be a number above 0 and at most 1000000000, not inf"),
        ({"checkpoint_timeout_s": 10**20}, "checkpoint_timeout_s must be a number above 0 and at most 1000000000"),
        ({"failover_patience_s": float("inf")}, "failover_patience_s must be a number above 0 and at most 1000000000"),
        ({"max_stall_s": 0}, "max_stall_s must be a number above 0, not 0"),
        ({"link_port": "x"}, "link_port must be a whole number of at least 0 and at most 65535, not 'x'"),
        ({"links": "no"}, "links must be True or False, not 'no'"),
        ({"trusted_uids": 1000}, "trusted_uids must be text, not 1000"),
        ({"storage": "/data/state"}, "Did you mean file:///data/state?"),
        ({"storage": Path("/data/state")}, "Did you mean file:///data/state?"),
        ({"storage": "s3a://bucket/p"}, "Did you mean s3://bucket/p? The service does not reach the bucket through"),
    ],
)
def test_error_says_what_to_write(values: dict[str, Any], told: str) -> None:
    """The error of a common mistake has bounds as numbers, and the value that was meant."""
    with pytest.raises(InvalidInputError, match=re.escape(told)):
        BackendSettings(**{"storage": "file:///s", "job": "job", **values})


@pytest.mark.parametrize(
    ("values", "switch"),
    [
        ({"standby_bytes_max": 1 << 30}, {"standby_replicas": 0}),
        ({"autoscale_max": 8}, {"autoscale_batch_ms": None}),
        ({"autoscale_min": 2}, {"autoscale_batch_ms": 100}),
        ({"max_lost_fraction": 0.1}, {"failover": "exact"}),
        ({"max_stall_s": 5}, {"failover": "deferred"}),
        ({"max_deferred_bytes": 5}, {"failover": "deferred"}),
    ],
)
def test_bounds_of_what_is_not_asked_for_are_refused(values: dict[str, Any], switch: dict[str, Any]) -> None:
    """Whoever bounds copies, losses or autoscaling expects to have them; a program that says they are off may."""
    [name], [option] = values, switch

    with pytest.raises(InvalidInputError, match=f"{name} has no effect without {option}, which is off by default"):
        BackendSettings.of("file:///s", "job", values)

    BackendSettings.of("file:///s", "job", {**values, **switch})


@pytest.mark.parametrize("renamed", [("ab",), ["ab", "cd"], {"ab"}])
def test_names_of_two_letters_are_no_pairs(renamed: Any) -> None:
    """A text of two letters would rename `a` to `b`."""
    with pytest.raises(InvalidInputError, match="renamed must be like"):
        BackendSettings("file:///s", "job", renamed=renamed)


def test_paths_may_be_paths() -> None:
    """A path that is given as such is taken as text, for settings are compared and sent to tasks."""
    given = {"local_dir": Path("/l"), "token_file": Path("/t"), "fork_location": Path("/c"), "ca_file": Path("/ca")}

    settings = BackendSettings.of("file:///s", "job", given)

    assert settings == BackendSettings.of("file:///s", "job", {name: str(path) for name, path in given.items()})


def test_local_folder_comes_from_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the option, the folder comes from the environment, or is the user's own in the temporary folder."""
    monkeypatch.setenv("DSTL_LOCAL_DIR", "/from/environment")
    assert BackendSettings("file:///s", "job").host_folder == "/from/environment"
    monkeypatch.delenv("DSTL_LOCAL_DIR")

    assert "dstl-" in BackendSettings("file:///s", "job").host_folder
    assert BackendSettings("file:///s", "job", local_dir="/mine").host_folder == "/mine"


def test_service_address_is_the_hosts_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the option, the address in a host's environment is used, and is checked there."""
    monkeypatch.setenv("DSTL_SERVICE", "http://127.0.0.1:7000")
    assert BackendSettings("file:///s", "job").host_service == "http://127.0.0.1:7000"
    assert BackendSettings("file:///s", "job", service="unix:///run/s").host_service == "unix:///run/s"

    monkeypatch.setenv("DSTL_SERVICE", "localhost:7000")
    with pytest.raises(InvalidInputError, match="must be unix:///path, http://host:port or https"):
        _ = BackendSettings("file:///s", "job").host_service

    monkeypatch.delenv("DSTL_SERVICE")
    assert BackendSettings("file:///s", "job").host_service is None


def test_storage_with_credentials_is_refused() -> None:
    """The storage's URL is part of command lines and errors, so it has no password; the error does not repeat it."""
    with pytest.raises(InvalidInputError, match="storage must not contain credentials") as refused:
        BackendSettings(storage="s3://key:5ecret@bucket/prefix", job="j")
    assert "5ecret" not in str(refused.value)


def test_authority_is_the_hosts_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the option, the certificates in a host's environment are used."""
    monkeypatch.setenv("DSTL_CA_FILE", "/from/environment")
    assert BackendSettings("file:///s", "job").host_ca_file == "/from/environment"
    assert BackendSettings("file:///s", "job", ca_file="/mine").host_ca_file == "/mine"

    monkeypatch.delenv("DSTL_CA_FILE")
    assert BackendSettings("file:///s", "job").host_ca_file is None


@pytest.mark.parametrize(
    "address", ["http://user:5ecret@host:1", "user:5ecret@host:1", "ftp://5ecret@host", "http:/5ecret@host"]
)
def test_address_with_password_is_refused_without_it(address: str) -> None:
    """An address with a password is refused without showing the password, also if it is wrong in other ways."""
    with pytest.raises(InvalidInputError, match="token_file") as caught:
        BackendSettings("file:///s", "job", service=address)
    assert "5ecret" not in str(caught.value)


@pytest.mark.parametrize("url", ["s3://key:5ecret@bucket", "s3//key:5ecret@bucket", "s3:/key:5ecret@bucket"])
def test_storage_with_credentials_is_refused_without_them(url: str) -> None:
    """A mistyped storage shows no credentials either."""
    with pytest.raises(InvalidInputError, match="must not contain credentials") as caught:
        BackendSettings(url, "job")
    assert "5ecret" not in str(caught.value)
