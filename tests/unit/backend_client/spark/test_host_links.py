"""Which queries accept links of other hosts, and where."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from backend_client.settings import BackendSettings
from backend_client.spark.driver.host_links import HostLinks
from dstl_service.wire import LinkAddress
from storage.errors import InvalidInputError


class Session:
    """Records what the coordinator is asked."""

    def __init__(self, error: Exception | None = None) -> None:
        self.asked: list[tuple[str, str, int]] = []
        self.watched: list[bool] = []
        self._error = error

    def open_links(self, host: str, bind_address: str, port: int) -> LinkAddress:
        """Return an address, or raise."""
        self.asked.append((host, bind_address, port))
        if self._error is not None:
            raise self._error
        return LinkAddress(host, len(self.asked), "", "")


def links(session: Session, master: str = "spark://h:1", conf: dict[str, str] | None = None, **given: Any) -> HostLinks:
    """Return the links of a query."""
    values = {"spark.driver.host": "driver.example", **(conf or {})}
    context = SimpleNamespace(master=master, getConf=lambda: values, getLocalProperty=lambda _: None)
    spark: Any = SimpleNamespace(sparkContext=context)
    known: Any = session
    watch: Any = SimpleNamespace(begin=lambda _: session.watched.append(True))
    return HostLinks(spark, known, BackendSettings("file:///s", "job", **given), watch)


def test_coordinator_is_asked_once_while_it_lives() -> None:
    """Each process of the coordinator listens on a port of its own."""
    session = Session()
    found = links(session)

    assert [found.address(name) for name in ("a", "a", "b")] == [
        LinkAddress("driver.example", 1, "", ""),
        LinkAddress("driver.example", 1, "", ""),
        LinkAddress("driver.example", 2, "", ""),
    ]


@pytest.mark.parametrize(
    ("conf", "expected"),
    [
        ({}, ("driver.example", "driver.example", 7)),
        ({"spark.driver.bindAddress": "0.0.0.0"}, ("driver.example", "0.0.0.0", 7)),
        ({"spark.driver.host": "[fd00::1]"}, ("fd00::1", "fd00::1", 7)),
    ],
)
def test_address_is_that_of_the_driver(conf: dict[str, str], expected: tuple[str, str, int]) -> None:
    """Other hosts reach the driver where Spark says so."""
    session = Session()

    links(session, conf=conf, link_port=7).address("a")

    assert session.asked == [expected]


@pytest.mark.parametrize("master", ["local[*]", "local-cluster[2,1,1024]"])
def test_local_master_has_no_links(master: str) -> None:
    """Its executors share the driver's sidecar."""
    session = Session()

    assert links(session, master).address("a") is None
    assert not session.asked


def test_links_may_be_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are by the setting, and where an administrator starts the sidecars."""
    session = Session()

    assert links(session, links=False).address("a") is None
    monkeypatch.setenv("DSTL_SERVICE", "http://127.0.0.1:7071")
    assert links(session).address("a") is None
    assert not session.asked


def test_query_runs_without_links(caplog: pytest.LogCaptureFixture) -> None:
    """If the coordinator cannot listen, one warning says why, and tasks store their own sets."""
    session = Session(InvalidInputError("the port is taken"))
    found = links(session)

    assert [found.address("a"), found.address("a")] == [None, None]
    assert len(session.asked) == 1
    assert not session.watched
    assert caplog.text.count("the port is taken") == 1
