"""Nothing is sent to, or accepted from, another user of the host who was there first."""

from __future__ import annotations

import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from backend_client.service import client
from backend_client.service.client import ServiceClient
from backend_client.service.job_session import connect
from backend_client.service.launcher import AutoStartedSidecar
from backend_client.settings import BackendSettings
from storage.errors import InvalidInputError, UnavailableError
from storage.private_folder import Trust, UntrustedFolderError
from tests.other_user import IS_ROOT, NOBODY, another_user


class Impostor:
    """A process of another user that listens at the sidecar's address and keeps what it receives."""

    def __init__(self, folder: str) -> None:
        self.path = f"{folder}/s.sock"
        self.got: list[bytes] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.path)
        os.chmod(self.path, 0o777)
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection, suppress(OSError):  # a refused client may be gone
                self.got.append(connection.recv(1000))
                connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}")

    def close(self) -> None:
        """Stop listening."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(30)


@contextmanager
def as_somebody_else(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make what is created in this context belong to another user; without root, make the kernel appear to say so."""
    with ExitStack() as stack:
        if IS_ROOT:
            stack.enter_context(another_user())
        else:
            monkeypatch.setattr(client, "peer_uid", lambda _: NOBODY)
        yield


@pytest.fixture
def impostor(monkeypatch: pytest.MonkeyPatch) -> Iterator[Impostor]:
    """Return a process that answers in the sidecar's place."""
    with as_somebody_else(monkeypatch):
        folder = tempfile.TemporaryDirectory(prefix="di")
        made = Impostor(folder.name)
    yield made
    made.close()
    folder.cleanup()


def test_other_user_who_listens_gets_nothing(impostor: Impostor) -> None:
    """Neither a request nor the token reaches a process of another user; the error says how to allow it."""
    client = ServiceClient(f"unix://{impostor.path}", "secret", patience_s=600)
    with pytest.raises(InvalidInputError, match=rf"uid {NOBODY}.*trusted_uids"):
        client.get("/v1/info")
    client.close()

    assert set(impostor.got) <= {b""}


def test_named_user_may_listen(impostor: Impostor) -> None:
    """A sidecar of a trusted user is accepted like one's own."""
    client = ServiceClient(f"unix://{impostor.path}", "secret", patience_s=30, trust=Trust.parse(str(NOBODY)))

    assert client.get("/v1/info") == {}
    client.close()


def test_other_user_in_place_of_the_embedded_sidecar_is_refused(impostor: Impostor, tmp_path: Path) -> None:
    """A listener of another user is refused even in one's own folder."""
    service = AutoStartedSidecar("file:///s", str(tmp_path), 60)
    os.symlink(impostor.path, service.socket_path)

    with pytest.raises(InvalidInputError, match=r"uid|is writable"):
        service.ensure()


@pytest.mark.parametrize("use", ["connect", "ensure", "tables"])
def test_folder_that_others_can_write_is_not_used(use: str) -> None:
    """A user who may write to `local_dir` could pose as the sidecar or plant tables, so each use checks it."""
    with tempfile.TemporaryDirectory(prefix="di") as name:  # short enough for a socket path
        folder = Path(name)
        folder.chmod(0o777)
        settings = BackendSettings("file:///s", "job", local_dir=name)

        with pytest.raises(UntrustedFolderError, match="is writable by other users"):
            if use == "connect":
                connect(settings)
            elif use == "ensure":
                AutoStartedSidecar("file:///s", name, 60).ensure()
            else:
                settings.private_folder("tables", "uid", "op", "00000-00001")
        assert list(folder.iterdir()) == []


@pytest.mark.skipif(not IS_ROOT, reason="only root can be another user")
def test_folder_of_another_user_is_not_used(tmp_path: Path) -> None:
    """A user who made the folder first gets neither socket nor tables, unless the settings name that user."""
    with another_user(), tempfile.TemporaryDirectory(prefix="di") as folder:
        os.chmod(folder, 0o755)
        settings = BackendSettings("file:///s", "job", local_dir=folder)
        named = BackendSettings("file:///s", "job", local_dir=folder, trusted_uids=str(NOBODY))
        os.seteuid(0)
        with pytest.raises(UntrustedFolderError, match=rf"uid {NOBODY}.*trusted_uids"):
            settings.private_folder("tables")

        assert Path(named.private_folder("tables")).stat().st_mode & 0o777 == 0o700
        Path(folder, "tables").rmdir()


def test_lock_that_is_a_link_is_not_truncated(tmp_path: Path) -> None:
    """The target of a planted link in place of the lock stays unchanged."""
    (tmp_path / "target").write_text("precious", encoding="utf-8")
    with tempfile.TemporaryDirectory(prefix="dl") as folder:  # in `tmp_path`, a socket path may be too long
        service = AutoStartedSidecar("strange://x", folder, 60)
        Path(service.socket_path).with_suffix(".lock").symlink_to(tmp_path / "target")

        with pytest.raises(UnavailableError, match=r"its lock .* cannot be opened"):
            service.ensure()
    assert (tmp_path / "target").read_text(encoding="utf-8") == "precious"


def test_default_folder_is_named_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """No user name from the environment leads a user to another one's folder."""
    monkeypatch.delenv("DSTL_LOCAL_DIR", raising=False)
    monkeypatch.setenv("LOGNAME", "somebody-else")

    assert Path(BackendSettings("file:///s", "job").host_folder).name == f"dstl-{os.geteuid()}"


def test_host_says_whom_it_trusts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The option takes precedence over the host's own environment."""
    monkeypatch.setenv("DSTL_TRUSTED_UIDS", "7")
    monkeypatch.setenv("DSTL_TRUSTED_DIR", "/volume")

    assert BackendSettings("file:///s", "job").host_trust == Trust(frozenset({7}), "/volume")
    assert BackendSettings("file:///s", "job", trusted_uids="8").host_trust.uids == {8}
