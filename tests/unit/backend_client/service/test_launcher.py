"""The sidecar that starts automatically: once per host and storage, and again after it was killed."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from backend_client.service.client import ServiceClient
from backend_client.service.launcher import AutoStartedSidecar
from storage.errors import InvalidInputError, UnavailableError
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(120)


def pid_of(service: AutoStartedSidecar) -> int:
    """Return the process id that the service reports."""
    client = ServiceClient(service.address, patience_s=30)
    try:
        return int(client.get("/v1/info")["pid"])
    finally:
        client.close()


def end(pid: int, how: int = signal.SIGKILL) -> None:
    """End a process that these tests started, and wait for it."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        process.send_signal(how)
        process.wait(60)


def is_listened_to(service: AutoStartedSidecar) -> bool:
    """Return whether some process has the service's socket; asking one that was killed would take all patience."""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(service.socket_path) == 0


@pytest.fixture
def service() -> Iterator[AutoStartedSidecar]:
    """Return where a sidecar will run, in a folder with a short name; any process there is ended after the test."""
    with tempfile.TemporaryDirectory(prefix="dl") as folder:
        made = AutoStartedSidecar(f"file://{folder}/storage", f"{folder}/local", 60)
        yield made
        if is_listened_to(made):
            with suppress(UnavailableError):
                end(pid_of(made))


def test_threads_start_one_process(service: AutoStartedSidecar) -> None:
    """Threads that need the sidecar at the same time share one."""
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: service.ensure(), range(8)))

    assert int(Path(service.pid_path).read_text(encoding="utf-8")) == pid_of(service)
    assert len(list(Path(service.folder).glob("*.sock"))) == 1


STARTER = """
import sys
from backend_client.service.client import ServiceClient
from backend_client.service.launcher import AutoStartedSidecar
service = AutoStartedSidecar(sys.argv[1], sys.argv[2], 60)
service.ensure()
print(ServiceClient(service.address).get("/v1/info")["service_id"])
"""


def test_processes_start_one_process(service: AutoStartedSidecar) -> None:
    """Worker processes of a host share one sidecar, which outlives the process that started it."""
    command = [sys.executable, "-c", STARTER, service.storage, service.folder]
    starters = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    answers = {starter.communicate(timeout=60)[0].strip() for starter in starters}

    assert len(answers) == 1
    assert {starter.returncode for starter in starters} == {0}
    assert pid_of(service)


def test_running_process_is_kept(service: AutoStartedSidecar) -> None:
    """A client that finds an answering sidecar starts none."""
    service.ensure()
    before = pid_of(service)
    service.ensure()

    assert pid_of(service) == before


def test_killed_process_is_started_again(service: AutoStartedSidecar) -> None:
    """A client whose sidecar was killed gets its answer from a new one."""
    service.ensure()
    client = ServiceClient(service.address, patience_s=30, ensure=service.ensure)
    before = client.get("/v1/info")
    end(before["pid"])
    after = client.get("/v1/info")
    client.close()

    assert after["pid"] != before["pid"]
    assert after["service_id"] != before["service_id"]


@pytest.mark.parametrize("recorded", [True, False])
def test_hung_process_is_replaced(service: AutoStartedSidecar, *, recorded: bool) -> None:
    """
    A client whose sidecar hangs gets its answer from a new one, within its patience; the old one is ended.

    This also works without a recorded process id: the starter may have ended first, or another start may have failed.
    """
    impatient = replace(service, answer_timeout_s=3.0)
    impatient.ensure()
    client = ServiceClient(service.address, patience_s=30, ensure=impatient.ensure)
    before = client.get("/v1/info")
    if not recorded:
        Path(service.pid_path).unlink()
    os.kill(before["pid"], signal.SIGSTOP)
    after = client.get("/v1/info")
    client.close()

    assert after["pid"] != before["pid"]
    with suppress(psutil.NoSuchProcess):  # without a process that reaps orphans, it stays as a zombie
        assert psutil.Process(before["pid"]).status() == psutil.STATUS_ZOMBIE


def test_slow_answer_is_waited_for() -> None:
    """A slow request is sent once, whatever health checks its service gets meanwhile."""
    with tempfile.TemporaryDirectory(prefix="dl") as folder, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/s")
        listener.listen()
        asked = threading.Semaphore(0)

        def answer_when_asked_thrice() -> bytes:
            connection, _ = listener.accept()
            with connection:
                received = connection.recv(1 << 16)
                for _ in range(3):
                    asked.acquire()
                connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
                connection.settimeout(30)
                return received + connection.recv(1 << 16)

        with ThreadPoolExecutor(1) as pool:
            served = pool.submit(answer_when_asked_thrice)
            client = ServiceClient(f"unix://{folder}/s", patience_s=1.0, ensure=asked.release)
            client.post("/v1/x", {}, patience_s=60)
            client.close()

    assert served.result().count(b"POST /v1/x") == 1


def test_slow_answer_is_waited_for_without_health_checks() -> None:
    """A slow request gets its answer even if the client cannot find out whether the service hangs."""
    with tempfile.TemporaryDirectory(prefix="dl") as folder, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/s")
        listener.listen()
        looked = threading.Event()

        def fail_to_look() -> None:
            looked.set()
            raise UnavailableError("kill it by hand")

        def answer_when_looked_after() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                looked.wait(30)
                connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")

        with ThreadPoolExecutor(1) as pool:
            served = pool.submit(answer_when_looked_after)
            client = ServiceClient(f"unix://{folder}/s", patience_s=1.0, ensure=fail_to_look)
            assert client.post("/v1/x", {}, patience_s=60) == {}
            client.close()
            served.result()


def test_slow_start_does_not_use_up_the_patience() -> None:
    """A request to a hung service is sent to the new one, even if the start took longer than the patience."""
    patience_s = 2.0  # the time left after the start is enough for a busy machine
    with tempfile.TemporaryDirectory(prefix="dl") as folder, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/s")
        listener.listen()
        hung: list[socket.socket] = []

        def replace_hung() -> None:
            if hung:
                return
            hung.append(listener.accept()[0])
            threading.Event().wait(2 * patience_s)
            hung[0].close()

        def answer_second() -> None:
            while not hung or hung[0].fileno() >= 0:
                threading.Event().wait(0.01)
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")

        with ThreadPoolExecutor(1) as pool:
            served = pool.submit(answer_second)
            client = ServiceClient(f"unix://{folder}/s", patience_s=patience_s, ensure=replace_hung)
            assert client.get("/v1/info") == {}
            client.close()
            served.result()


def test_foreign_listener_is_left_alone(service: AutoStartedSidecar) -> None:
    """A silent listener that was not started here is not killed: the error says what to do."""
    Path(service.folder).mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(service.socket_path)
        listener.listen()
        with pytest.raises(UnavailableError, match="kill it by hand"):
            replace(service, answer_timeout_s=0.1).ensure()
    Path(service.socket_path).unlink()
    service.ensure()  # the fixture ends it


def fill_queue(service: AutoStartedSidecar, listener: socket.socket) -> list[socket.socket]:
    """Listen at the sidecar's address, and return as many connections as the accept queue holds."""
    Path(service.folder).mkdir(mode=0o700)
    listener.bind(service.socket_path)
    listener.listen(0)
    waiting: list[socket.socket] = []
    with suppress(BlockingIOError):
        while True:
            waiting.append(socket.socket(socket.AF_UNIX))
            waiting[-1].setblocking(False)
            waiting[-1].connect(service.socket_path)
    return waiting


def test_full_queue_is_waited_for(service: AutoStartedSidecar) -> None:
    """A sidecar whose accept queue is full for a moment is waited for, not killed."""
    with socket.socket(socket.AF_UNIX) as listener, ThreadPoolExecutor(1) as pool:
        waiting = fill_queue(service, listener)
        ensured = pool.submit(replace(service, answer_timeout_s=60.0).ensure)
        with suppress(TimeoutError):
            assert ensured.exception(timeout=2.0) is None
        for client in waiting:
            client.close()
        while not ensured.done():
            connection, _ = listener.accept()
            with connection, suppress(OSError):
                if connection.recv(1 << 16):
                    connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
                    wait([ensured])
        assert ensured.exception() is None
    Path(service.socket_path).unlink()
    service.ensure()  # the fixture ends it


def test_sidecar_of_another_storage_is_left_alone(service: AutoStartedSidecar) -> None:
    """A process whose id is in an old file is not killed for a socket that is not its own."""
    command = [sys.executable, "-c", "input()", "dstl_service", "serve", "--socket", f"{service.folder}/other.sock"]
    other = subprocess.Popen(command, stdin=subprocess.PIPE)
    with socket.socket(socket.AF_UNIX) as listener:
        waiting = fill_queue(service, listener)
        Path(service.pid_path).write_text(f"{other.pid}\n", encoding="utf-8")
        with pytest.raises(UnavailableError, match="kill it by hand"):
            replace(service, answer_timeout_s=0.1).ensure()
        assert other.poll() is None
        other.communicate(b"\n")
        for client in waiting:
            client.close()
    Path(service.socket_path).unlink()
    service.ensure()  # the fixture ends it


def test_hung_sidecar_of_a_trusted_user_is_left_to_that_one(
    service: AutoStartedSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says who can end it; a bare "operation not permitted" would not."""
    service.ensure()
    pid = pid_of(service)

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    os.kill(pid, signal.SIGSTOP)
    try:
        with monkeypatch.context() as patched, pytest.raises(UnavailableError, match=f"{pid} is another user's"):
            patched.setattr(os, "kill", refuse)
            replace(service, answer_timeout_s=0.5).ensure()
    finally:
        end(pid)


def test_failed_start_shows_log() -> None:
    """The error for a sidecar that cannot start shows the end of its log."""
    with tempfile.TemporaryDirectory(prefix="dl") as folder, pytest.raises(UnavailableError, match="unknown store URL"):
        AutoStartedSidecar("strange://x", folder, 60).ensure()


def no_process(*_: object, **options: Any) -> None:
    """Fail like a shell that cannot fork."""
    options["stderr"].write(b"sh: 1: Cannot fork\n")
    raise subprocess.CalledProcessError(2, ["/bin/sh", "-c", "a long command"])


def no_memory(*_: object, **__: object) -> None:
    """Fail like a process that cannot be forked."""
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


def no_answer(*_: object, **__: object) -> subprocess.CompletedProcess[bytes]:
    """Return the output of a shell that could not write."""
    return subprocess.CompletedProcess([], 0, stdout=b"")


@pytest.mark.parametrize(
    ("run", "why"),
    [
        (no_process, r"the shell that starts it ended with 2.*Cannot fork"),
        (no_memory, ".*Cannot allocate memory"),
        (no_answer, "ValueError"),
    ],
)
def test_refused_start_names_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Callable[..., Any], why: str
) -> None:
    """If the system refuses to start a sidecar, the error is one that the query retries; it names log and cause."""
    monkeypatch.setattr(subprocess, "run", run)
    with tempfile.TemporaryDirectory(prefix="dl") as folder:
        service = AutoStartedSidecar(f"file://{tmp_path}", folder, 60)
        with pytest.raises(UnavailableError, match=f"(?s)did not start: {why}") as raised:
            service.ensure()

    assert "a long command" not in raised.value.message
    for words in (service.log_path, "processes, memory and disk space", "the log ends: "):
        assert words in raised.value.message


@pytest.mark.parametrize("suffix", ["lock", "log", "pid"])
def test_file_that_cannot_be_written_is_an_error_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    """If the disk refuses a file of the sidecar, the error names the file; it is not a bare OSError."""
    monkeypatch.setattr(
        subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, stdout=str(os.getpid()).encode())
    )
    with tempfile.TemporaryDirectory(prefix="dl") as folder:
        service = AutoStartedSidecar(f"file://{tmp_path}", folder, 60)
        Path(service.log_path).with_suffix(f".{suffix}").mkdir()
        with pytest.raises(UnavailableError, match=rf"(?s)did not start: .*\.{suffix}"):
            service.ensure()


def test_long_folder_is_refused(tmp_path: Path) -> None:
    """A folder whose socket path is too long for the kernel is refused with the setting to change."""
    with pytest.raises(InvalidInputError, match="local_dir"):
        AutoStartedSidecar("file:///s", str(tmp_path / ("x" * 100)), 60).ensure()


def test_storages_have_processes_of_their_own() -> None:
    """Two storages on one host never share a sidecar."""
    one, other = AutoStartedSidecar("file:///a", "/l", 60), AutoStartedSidecar("file:///b", "/l", 60)

    assert one.socket_path != other.socket_path
    assert one.address == f"unix://{one.socket_path}"


def test_configurations_have_processes_of_their_own() -> None:
    """One bucket's name may be on two servers: a job's state never goes to that of another job's configuration."""
    paths = {AutoStartedSidecar("s3://bucket", "/l", 60, file).socket_path for file in (None, "/one.toml", "/two.toml")}

    assert len(paths) == 3


def test_versions_have_processes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an upgrade, tasks do not use the sidecar of the version before, which ends when it is idle."""
    before = AutoStartedSidecar("s3://bucket", "/l", 60).socket_path
    monkeypatch.setattr("backend_client.service.launcher.PROGRAM_VERSION", "999")

    assert AutoStartedSidecar("s3://bucket", "/l", 60).socket_path != before


def test_sidecar_outlives_the_folder_through_which_it_was_started(
    service: AutoStartedSidecar, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container's folder has links to the application's environment, and is deleted before that."""
    environment, container = tmp_path / "filecache", tmp_path / "container"
    (environment / "bin").mkdir(parents=True)
    (environment / "bin" / "python").symlink_to(sys.executable)
    (environment / "modules").mkdir()
    container.mkdir()
    (container / "environment").symlink_to(environment)
    (container / "modules.zip").symlink_to(environment / "modules")
    monkeypatch.setattr(sys, "executable", str(container / "environment" / "bin" / "python"))
    monkeypatch.setattr(sys, "path", [str(container / "modules.zip"), *sys.path])

    service.ensure()

    process = psutil.Process(pid_of(service))
    assert process.cmdline()[0] == str(environment / "bin" / "python")
    paths = process.environ()["PYTHONPATH"].split(os.pathsep)
    assert paths[0] == str(environment / "modules")
    assert not [path for path in paths if path.startswith(str(container))]


def test_log_of_a_long_life_stays_small(service: AutoStartedSidecar, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a sidecar runs, its log is a few files of bounded size, and errors go to the newest."""
    bytes_max = 4096
    monkeypatch.setenv("DSTL_LOG_FILE_BYTES_MAX", str(bytes_max))
    service.ensure()
    log, client = Path(service.log_path), ServiceClient(service.address, patience_s=30)
    third = log.with_name(f"{log.name}.3")

    for number in range(1000):
        client.post(f"/v1/jobs/job-{number}/epochs", {"owner": "x" * 500})
        if third.exists():
            break

    names = [log.name, *(f"{log.name}.{number}" for number in (1, 2, 3))]
    # A line after the last answer may start a new file at this moment.
    wait_until(lambda: sorted(file.name for file in log.parent.glob(f"{log.name}*")) == names, what="the log's files")
    files = [log.with_name(name) for name in names]
    assert all(file.stat().st_size <= bytes_max for file in files)
    assert os.readlink(f"/proc/{client.get('/v1/info')['pid']}/fd/2") == os.path.realpath(log)
    client.close()
