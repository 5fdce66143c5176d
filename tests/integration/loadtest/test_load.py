"""The load test itself: a short run through locust, and its driver and hosts on their own service."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import gevent
import pytest

from loadtest.load.driver import SimulatedDriver
from loadtest.load.hosts import HostGoneError, SimulatedHost
from loadtest.load.key_patterns import PATTERNS
from loadtest.load.settings import LoadSettings
from loadtest.load.workload import WrongDataError
from storage.errors import UnavailableError
from storage.open import open_store
from tests.waiting import wait_until
from tools.servers.programs import free_port
from tools.servers.service.process import ServiceProcess

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[3]


def load_command(folder: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "loadtest.load", "--reports", str(folder), *arguments]


def load_environment(**variables: str) -> dict[str, str]:
    unset = dict.fromkeys(("SERVICE", "STRICT", "SHORT", "WORKLOAD", "SHAPE", "STORE", "THRESHOLDS"), "")
    return {**os.environ, "PYTHONPATH": str(ROOT), **unset, **variables}


class TestProgram:
    """`make load` and `make load-web`."""

    def test_short_run_reports_without_error(self, tmp_path: Path) -> None:
        """A few seconds against the S3 server: no failure, and complete results in table, CSV, HTML and JSON."""
        limits = tmp_path / "limits.toml"
        limits.write_text('failures = "== 0"\ncheckpoints = ">= 2"\n')
        run = subprocess.run(
            load_command(tmp_path),
            env=load_environment(SLOTS="12", HOSTS="3", RATE="4", DURATION="4", THRESHOLDS=str(limits)),
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )

        assert run.returncode == 0, run.stdout + run.stderr
        rows = {row["name"]: row for row in json.loads((tmp_path / "load.json").read_text())}
        assert rows["failures"]["value"] == 0
        made = rows["checkpoints"]["value"]
        assert made >= 2
        assert rows["append: requests"]["value"] >= 12 * made
        assert rows["restore: requests"]["value"] >= 12 * (made - 1)
        assert rows["objects per checkpoint, mean"]["value"] >= 2
        for percent in ("50", "90", "99", "99.9"):
            assert rows[f"checkpoint latency p{percent}"]["value"] > 0
        assert rows["CPU of the service"]["value"] > 0
        assert rows["checkpoints"]["goal"] == ">= 2"
        with (tmp_path / "load" / "load_stats.csv").open(newline="") as file:
            table = {row["Name"]: row for row in csv.DictReader(file)}
        assert {"append", "persist", "checkpoint", "restore", "checkpoint KiB", "checkpoint objects"} <= table.keys()
        assert {"50%", "90%", "99%", "99.9%"} <= table["checkpoint"].keys()
        assert int(table["checkpoint"]["Request Count"]) == made
        assert int(table["checkpoint objects"]["50%"]) >= 2
        page = (tmp_path / "load" / "load.html").read_text()
        assert "checkpoint objects" in page
        assert "response_time_percentile_0.999" in page
        assert "99.9%" in run.stdout + run.stderr

    def test_impossible_variable_ends_program(self, tmp_path: Path) -> None:
        """An invalid variable ends the program with code 2 and the variable's name, before anything is started."""
        run = subprocess.run(
            load_command(tmp_path), env=load_environment(SLOTS="none"), capture_output=True, text=True, check=False
        )

        assert (run.returncode, "SLOTS" in run.stderr) == (2, True)

    def test_outage_of_a_slow_store_is_outlasted(self, tmp_path: Path) -> None:
        """SHORT=1: the store draws latencies and goes away for a while; no request fails, a missed threshold counts."""
        limits = tmp_path / "limits.toml"
        limits.write_text('slots = ">= 9"\n"outage: checkpoints" = "<= 100"\n')
        named = {"WORKLOAD": "value-state", "SHAPE": "outage", "STORE": "same-zone", "THRESHOLDS": str(limits)}
        run = subprocess.run(
            load_command(tmp_path),
            env=load_environment(SHORT="1", **named),
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )

        assert (run.returncode, "load: missed: slots\n" in run.stderr) == (1, True), run.stdout + run.stderr
        rows = {row["name"]: row for row in json.loads((tmp_path / "load.json").read_text())}
        assert rows["failures"]["value"] == 0
        assert [rows[name]["holds"] for name in ("slots", "outage: checkpoints")] == [False, True]
        assert rows["store: requests in outages"]["value"] > 0
        assert rows["before: checkpoints"]["value"] > 0
        assert rows["after: checkpoints"]["value"] > 0
        assert rows["first checkpoint after the outage"]["value"] > 0
        drawn = rows["store, small: requests"]["value"]
        assert drawn >= 2 * rows["checkpoints"]["value"]
        assert rows["store, small: p50, deviation"]["holds"]
        assert rows["store, small: p50 wanted"]["value"] == 15

    def test_unknown_figure_ends_program(self, tmp_path: Path) -> None:
        """A threshold on an unknown figure ends the program with code 2 and the known ones, before anything starts."""
        limits = tmp_path / "limits.toml"
        limits.write_text('"checkpoint latency p98" = "<= 1"\n')
        run = subprocess.run(
            load_command(tmp_path),
            env=load_environment(THRESHOLDS=str(limits)),
            capture_output=True,
            text=True,
            check=False,
        )

        assert run.returncode == 2
        assert "'checkpoint latency p98'" in run.stderr
        assert "\n  checkpoint latency p99.9\n" in run.stderr

    def test_web_page_is_served_on_loopback(self, tmp_path: Path) -> None:
        """`make load-web` serves locust's page on loopback and ends, with all its processes, on Ctrl-C."""
        port = free_port()
        process = subprocess.Popen(
            load_command(tmp_path, "--web", "--web-port", str(port)),
            env=load_environment(SLOTS="2", STORAGE="file"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            page = wait_until(lambda: fetch(f"http://127.0.0.1:{port}/"), what="the page")
            assert "Locust" in page
        finally:
            os.killpg(process.pid, signal.SIGINT)
            process.wait(60)
        wait_until(lambda: not group_runs(process.pid), what="the end of all processes")


def fetch(url: str) -> str:
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return str(answer.read().decode())
    except OSError:
        return ""


def group_runs(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


class LoadRun:
    """A driver and two hosts on their own service, without locust."""

    def __init__(self, service: ServiceProcess, workload: str = "mixed") -> None:
        self.settings = LoadSettings(slots=5, hosts=2, service=service.address, workload=workload)
        self.failed: list[str] = []
        self.requests: list[str] = []
        self.driver = SimulatedDriver(self.settings, self.record)
        self.hosts = [SimulatedHost(self.settings, self.settings.slots_of(n), self.record) for n in range(2)]
        self.serving = [gevent.spawn(self.serve, host) for host in self.hosts]

    def record(self, name: str, elapsed_ms: float, size_bytes: int, error: Exception | None) -> None:
        (self.requests if error is None else self.failed).append(name)

    def serve(self, host: SimulatedHost) -> None:
        while True:
            host.serve(1.0)

    def close(self) -> None:
        gevent.killall(self.serving)
        for host in self.hosts:
            host.close()
        self.driver.close()


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"file://{tmp_path}"


@pytest.fixture
def load(store: str) -> Iterator[LoadRun]:
    with ServiceProcess(store) as service:
        made = LoadRun(service)
        yield made
        made.close()


class TestDriverAndHosts:
    """The actions of locust's users."""

    def test_batches_build_on_each_other(self, load: LoadRun, store: str) -> None:
        """I3, I14: checkpoints are consecutive, tables are verified, and the reported sets are stored."""
        made = [load.driver.run_batch(load.hosts) for _ in range(6)]

        assert [checkpoint.checkpoint_id for checkpoint in made] == list(range(6))
        assert not load.failed
        assert load.requests.count("restore") >= 5 * 5
        stored = sum(info.size_bytes for info in open_store(store).list("load/segments/"))
        manifests = sum(info.size_bytes for info in open_store(store).list("load/checkpoints/"))
        written = sum(checkpoint.bytes_written for checkpoint in made)
        assert stored < written <= stored + manifests

    @pytest.mark.parametrize("workload", [name for name in PATTERNS if name != "mixed"])
    def test_tables_are_right_in_every_workload(self, store: str, workload: str) -> None:
        """I14: tables of every workload are verified, also across ends of windows and bursts."""
        with ServiceProcess(store) as service:
            load = LoadRun(service, workload)
            for _ in range(12):
                load.driver.run_batch(load.hosts)
            load.close()

        assert not load.failed
        assert load.requests.count("restore") >= 11 * 5

    def test_wrong_data_is_failure(self, load: LoadRun) -> None:
        """I14: a table that differs from the checkpoints is a failed `restore`, and fails the batch."""
        load.driver.run_batch(load.hosts)
        truth = load.driver._truth
        changed = next(key for keys in truth.content.values() for key in keys)
        truth.apply({changed: b"something else"})

        with pytest.raises(WrongDataError, match="1 have a wrong value"):
            load.driver.run_batch(load.hosts)
        assert load.failed == ["restore"]

    def test_hosts_may_come_and_go(self, load: LoadRun) -> None:
        """Another number of slots changes the partitions: tables are restored from nothing, and are correct."""
        for hosts in (load.hosts[:1], load.hosts, load.hosts[1:], load.hosts):
            load.driver.run_batch(hosts)

        assert not load.failed

    def test_host_that_left_is_no_failure(self, load: LoadRun) -> None:
        """A batch whose host leaves is given up without a failure, and executed again by the others."""
        gevent.kill(load.serving[1])
        load.hosts[1].close()

        with pytest.raises(HostGoneError):
            load.driver.run_batch(load.hosts)
        assert load.driver.run_batch(load.hosts[:1]).checkpoint_id == 0
        assert not load.failed

    def test_lost_answer_is_found_out(self, load: LoadRun, monkeypatch: pytest.MonkeyPatch) -> None:
        """I3: a driver whose checkpoint exists although its answer was lost continues after it."""
        load.driver.run_batch(load.hosts)
        session = load.driver._owned_session()
        complete = session.complete

        def lose_answer(*arguments: object) -> None:
            complete(*arguments)  # type: ignore[arg-type]  # passed on unchanged
            raise UnavailableError("the answer is lost")

        monkeypatch.setattr(session, "complete", lose_answer)
        with pytest.raises(UnavailableError):
            load.driver.run_batch(load.hosts)

        assert load.driver.run_batch(load.hosts).checkpoint_id == 2
        assert load.failed == ["checkpoint"]
