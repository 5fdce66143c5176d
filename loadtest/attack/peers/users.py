"""Another user of the same host, played by root: at sockets, folders, locks and caches."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from backend_client.service.client import ServiceClient
from backend_client.service.launcher import AutoStartedSidecar
from dstl_service.wire import CheckpointRef
from loadtest.attack.harness.case import Case
from loadtest.attack.harness.other_user import CALL, IS_ROOT, LIST, NOBODY, as_nobody, folder_of, impostor, service_on
from loadtest.attack.harness.target import TOKEN, Attacked
from storage.errors import DstlError, InternalError
from tools.servers.service.job_driver import JobDriver

GROUP = "two users of a host"


def _closed_socket(_: Attacked) -> str | None:
    with folder_of(mode=0o755) as folder, service_on(folder / "s"):
        said = as_nobody(CALL, str(folder / "s"))
        return None if "PermissionError" in said else f"the other user got {said!r}"


def _opened_socket(_: Attacked) -> str | None:
    """Even if the socket's mode admits another user, the kernel reports whose process it is."""
    with folder_of(mode=0o755) as folder, service_on(folder / "s"):
        (folder / "s").chmod(0o777)
        said = as_nobody(CALL, str(folder / "s"))
        return f"the other user got {said!r}" if " 200 " in said else None


def _modes_under_umask(_: Attacked) -> str | None:
    with folder_of(mode=0o755) as folder, service_on(folder / "s", setup="umask 000"):
        mode = (folder / "s").stat().st_mode & 0o777
        return None if mode & 0o077 == 0 else f"the socket has mode {mode:o}"


def _impostor_gets_nothing(_: Attacked) -> str | None:
    with folder_of(NOBODY, 0o755) as folder, impostor(folder / "s") as got:
        client = ServiceClient(f"unix://{folder / 's'}", TOKEN, patience_s=2.0)
        with suppress(DstlError):
            client.get("/v1/info")
        client.close()
        return "the impostor got the token" if TOKEN in got() else None


def _impostor_hands_nothing_out(_: Attacked) -> str | None:
    with folder_of(NOBODY, 0o755) as folder, impostor(folder / "s"):
        client = ServiceClient(f"unix://{folder / 's'}", None, patience_s=2.0)
        try:
            answer = client.get("/v1/info")
        except DstlError:
            return None
        finally:
            client.close()
        return f"the impostor's answer {answer!r} was believed"


def _refused_folder(owner: int, mode: int) -> Callable[[Attacked], str | None]:
    def run(_: Attacked) -> str | None:
        with folder_of(owner, mode) as folder:
            return _is_refused(folder) or ("something was written there" if list(folder.iterdir()) else None)

    return run


def _is_refused(folder: Path) -> str | None:
    with tempfile.TemporaryDirectory() as storage:
        service = AutoStartedSidecar(f"file://{storage}/s", str(folder), 60)
        try:
            service.ensure()
        except (DstlError, OSError):
            return None
        finally:
            _stop(service)
    return "the sidecar started there"


def _stop(service: AutoStartedSidecar) -> None:
    with suppress(OSError, ValueError):
        pid = int(Path(service.pid_path).read_text(encoding="utf-8"))
        os.kill(pid, 15)
        while Path(f"/proc/{pid}").exists():
            time.sleep(0.02)


def _linked_folder(_: Attacked) -> str | None:
    """A planted link in place of the folder does not redirect the sidecar into an attacker's folder."""
    with folder_of(NOBODY, 0o777) as theirs, folder_of(0, 0o1777) as shared:
        link = shared / "dstl"
        link.symlink_to(theirs)
        os.lchown(link, NOBODY, NOBODY)
        return _is_refused(link)


def _folder_below_a_writable_one(_: Attacked) -> str | None:
    with folder_of(0, 0o777) as shared:
        (shared / "own").mkdir(mode=0o700)
        return _is_refused(shared / "own")


def _own_folder_is_closed(_: Attacked) -> str | None:
    """The sidecar's files are closed to others whatever the umask."""
    before = os.umask(0)
    try:
        with folder_of(0, 0o755) as folder, tempfile.TemporaryDirectory() as storage:
            service = AutoStartedSidecar(f"file://{storage}/s", str(folder / "local"), 60)
            service.ensure()
            try:
                mode = (folder / "local").stat().st_mode & 0o777
                said = as_nobody(LIST, str(folder / "local"))
            finally:
                _stop(service)
    finally:
        os.umask(before)
    if mode & 0o077:
        return f"the folder has mode {mode:o}"
    return None if "PermissionError" in said else f"the other user read {said!r}"


def _lock_link_of_the_service(_: Attacked) -> str | None:
    with folder_of(0, 0o755) as folder:
        precious = folder / "precious"
        precious.write_text("precious")
        (folder / "s.lock").symlink_to(precious)
        with service_on(folder / "s"):
            return None if precious.read_text() == "precious" else "the link's target was truncated"


def _lock_link_of_the_sidecar(_: Attacked) -> str | None:
    with folder_of(0, 0o700) as folder, tempfile.TemporaryDirectory() as storage:
        precious = folder / "precious"
        precious.write_text("precious")
        service = AutoStartedSidecar(f"file://{storage}/s", str(folder), 60)
        Path(service.socket_path).with_suffix(".lock").symlink_to(precious)
        with suppress(DstlError, OSError):
            service.ensure()
        _stop(service)
        return None if precious.read_text() == "precious" else "the link's target was truncated"


def _file_in_the_sockets_place(_: Attacked) -> str | None:
    with folder_of(0, 0o700) as folder:
        (folder / "s").write_text("precious")
        with service_on(folder / "s"):
            return None if (folder / "s").read_text() == "precious" else "the file was replaced"


def _cache_folder(plant: Callable[[Path, Path], None]) -> Callable[[Attacked], str | None]:
    """Start a service whose cache folder holds foreign files; all of them stay."""

    def run(_: Attacked) -> str | None:
        with folder_of(0, 0o755) as folder, folder_of(0, 0o755) as cache:
            precious = folder / "precious"
            (precious / "deep").mkdir(parents=True)
            (precious / "deep" / "file").write_text("precious")
            plant(cache, precious)
            before = sorted(str(path) for path in cache.rglob("*"))
            with service_on(folder / "s", storage=folder / "storage"):
                ref = _checkpoint(folder / "s")
            with service_on(folder / "s", storage=folder / "storage", environment={"DSTL_CACHE_FOLDER": str(cache)}):
                _restore(folder / "s", ref)
            missing = sorted(set(before) - {str(path) for path in cache.rglob("*")})
            if not (precious / "deep" / "file").exists():
                return "a link's target was deleted"
            return f"{missing[0]} was deleted" if missing else None

    return run


def _job_at(socket_path: Path) -> JobDriver:
    return JobDriver(ServiceClient(f"unix://{socket_path}", patience_s=20.0), "cached")


def _checkpoint(socket_path: Path) -> CheckpointRef:
    job = _job_at(socket_path)
    ref = job.complete([job.append(b"payload", 1)]).ref
    job.client.close()
    return ref


def _restore(socket_path: Path, ref: CheckpointRef) -> None:
    """Make a service with empty caches read a job's state, which makes it prepare its folder."""
    with suppress(DstlError):  # it may refuse to use such a folder
        job = _job_at(socket_path)
        if job.payloads(ref) != [b"payload"]:
            raise InternalError("the restore returned other data")
        job.client.close()


def _directories(cache: Path, _: Path) -> None:
    for name in ("home", "dstl-downloads", "0123456789abcdef", ".ssh"):
        (cache / name / "deep").mkdir(parents=True)
        (cache / name / "deep" / "file").write_text("precious")


def _links(cache: Path, precious: Path) -> None:
    for name in ("link", "dstl-downloads", f"dstl-downloads-{os.geteuid()}"):
        (cache / name).symlink_to(precious)


def _stale_looking(cache: Path, _: Path) -> None:
    for name in ("a.part", "b.tmp", "c.sst"):
        (cache / name).write_text("precious")
        os.utime(cache / name, (0, 0))


def _warned(name: str, *arguments: str, mode: int = 0o600) -> Case:
    def run(_: Attacked) -> str | None:
        with folder_of(0, 0o700) as folder:
            tokens = folder / "tokens"
            tokens.write_text(f"{TOKEN}\n")
            tokens.chmod(mode)
            given = [argument.format(tokens=tokens) for argument in arguments]
            with service_on(folder / "s", *given) as log:
                said = any(word in log.lower() for word in ("other users", "others", "command line", "readable"))
                return None if said else "the log does not warn"

    return Case(GROUP, name, run, is_short=False)


_LONG = {"umask 000 and the socket", "planted a file as socket", "cache folder with old files in it"}


def cases() -> list[Case]:
    """Return the cases of this group; none without root, who alone can act as two users."""
    if not IS_ROOT:
        return []
    attacks: dict[str, Callable[[Attacked], str | None]] = {
        "calls the service's socket": _closed_socket,
        "calls the socket, whose mode was opened": _opened_socket,
        "umask 000 and the socket": _modes_under_umask,
        "umask 000 and the sidecar's folder": _own_folder_is_closed,
        "listens first: token": _impostor_gets_nothing,
        "listens first: answers": _impostor_hands_nothing_out,
        "made the local folder first": _refused_folder(NOBODY, 0o755),
        "may write the local folder": _refused_folder(0, 0o777),
        "planted a link as local folder": _linked_folder,
        "may write the folder above": _folder_below_a_writable_one,
        "planted a link as lock of the service": _lock_link_of_the_service,
        "planted a link as lock of the sidecar": _lock_link_of_the_sidecar,
        "planted a file as socket": _file_in_the_sockets_place,
        "cache folder with other folders in it": _cache_folder(_directories),
        "cache folder with links in it": _cache_folder(_links),
        "cache folder with old files in it": _cache_folder(_stale_looking),
    }
    found = [Case(GROUP, name, attack, is_short=name not in _LONG) for name, attack in attacks.items()]
    return [
        *found,
        _warned("token file that others can read", "--token-file", "{tokens}", mode=0o644),
        _warned("token on the command line", "--set", "token=abcdefgh"),
    ]
