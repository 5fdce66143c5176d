"""Environment variables of a load test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loadtest.load.settings import LoadSettings
from storage.errors import InvalidInputError


def test_defaults_are_those_of_figure() -> None:
    """Without variables: 100 slots, 5 checkpoints a second, 60 s, against S3."""
    settings = LoadSettings.of({"SLOTS": "", "PATH": "/bin"})

    assert (settings.slots, settings.rate, settings.duration_s, settings.storage) == (100, 5.0, 60, "s3")
    assert settings == LoadSettings()


def test_variables_win() -> None:
    """Each variable sets its setting."""
    given = {"SLOTS": "7", "HOSTS": "3", "RATE": "0.5", "DURATION": "9", "STORAGE": "file", "SEED": "4", "JOB": "j"}
    settings = LoadSettings.of({**given, "SERVICE": "unix:///s", "DSTL_TOKEN": "t"})

    assert settings == LoadSettings(7, 3, 0.5, 9, "file", "unix:///s", "t", 4, "j")
    named = LoadSettings.of({"WORKLOAD": "burst", "SHAPE": "ramp", "STORE": "lossy", "THRESHOLDS": "a.toml"})
    assert named == LoadSettings(workload="burst", shape="ramp", store="lossy", thresholds=Path("a.toml"))


def test_shape_and_store_have_defaults() -> None:
    """A soak takes an hour, a slow store gets a rate that it can serve, unless told otherwise; SHORT wins."""
    assert LoadSettings.of({"SHAPE": "soak"}).duration_s == 3_600
    assert LoadSettings.of({"SHAPE": "soak", "DURATION": "7"}).duration_s == 7
    assert LoadSettings.of({"STORE": "s3-standard"}).rate == 1
    assert LoadSettings.of({"STORE": "s3-standard", "RATE": "3"}).rate == 3
    short = LoadSettings.of({"SHAPE": "soak", "SHORT": "1"})
    assert (short.slots, short.hosts, short.rate, short.duration_s) == (8, 2, 2.0, 8)
    assert LoadSettings.of({"SHORT": "0"}) == LoadSettings()


@pytest.mark.parametrize(
    ("name", "listed"), [("WORKLOAD", "sliding-window"), ("SHAPE", "outage"), ("STORE", "s3-standard")]
)
def test_unknown_name_is_refused(name: str, listed: str) -> None:
    """For an unknown workload, shape or store, the error lists the known ones."""
    with pytest.raises(InvalidInputError, match=f"{name} must be one of .*{listed}.*'nothing'"):
        LoadSettings.of({name: "nothing"})


@pytest.mark.parametrize("where", [{"STORAGE": "file"}, {"SERVICE": "unix:///s"}])
@pytest.mark.parametrize("what", [{"STORE": "lossy"}, {"SHAPE": "outage"}])
def test_proxy_needs_own_store(where: dict[str, str], what: dict[str, str]) -> None:
    """A profile or an outage of a store that the test does not start is refused."""
    with pytest.raises(InvalidInputError, match="need a store of the test's own"):
        LoadSettings.of({**where, **what}).require_store()
    LoadSettings.of(where).require_store()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SLOTS", "0"),
        ("SLOTS", "x"),
        ("SLOTS", "40000"),
        ("HOSTS", "0"),
        ("HOSTS", "101"),
        ("RATE", "0"),
        ("RATE", "inf"),
        ("RATE", "nan"),
        ("DURATION", "0"),
        ("STORAGE", "tape"),
    ],
)
def test_impossible_value_is_refused(name: str, value: Any) -> None:
    """An invalid value is refused with the variable's name."""
    with pytest.raises(InvalidInputError, match=name):
        LoadSettings.of({name: value})


def test_few_slots_have_one_host_each() -> None:
    """With fewer slots than default hosts, the number of hosts is that of slots."""
    assert LoadSettings.of({"SLOTS": "2"}).hosts == 2


@pytest.mark.parametrize(("slots", "hosts"), [(100, 4), (7, 3), (5, 5), (1, 1)])
def test_hosts_share_all_slots(slots: int, hosts: int) -> None:
    """Hosts' slots differ by one at most, and each slot has a key group."""
    settings = LoadSettings(slots=slots, hosts=hosts)
    shares = [settings.slots_of(host) for host in range(hosts)]

    assert sum(shares) == slots
    assert max(shares) - min(shares) <= 1
    assert settings.max_parallelism >= slots


@pytest.mark.parametrize(("slots", "expected"), [(1, 128), (128, 128), (129, 256), (32_768, 32_768)])
def test_key_groups_cover_slots(slots: int, expected: Any) -> None:
    """The number of key groups is the number of slots, rounded up to a power of two."""
    assert LoadSettings(slots=slots, hosts=1).max_parallelism == expected
