"""
Access to a real service process: sockets, TLS, tokens, limits.

A failure means that strangers are admitted, that a running service is displaced, or that secrets can be read.
"""

from __future__ import annotations

import os
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest
import trustme

from backend_client.service.client import ServiceClient
from dstl_service.peers.client import PeerClient
from dstl_service.wire import ChangeSetRef
from storage.errors import DstlError, InvalidInputError, LostChangesError, UnauthorizedError, UnavailableError
from tests.waiting import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]


@pytest.fixture
def folder() -> Iterator[Path]:
    """Return a folder whose name is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="da") as name:
        yield Path(name)


def command_of(folder: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "dstl_service", "serve", "--storage", (folder / "storage").as_uri(), *arguments]


@contextmanager
def running(folder: Path, *arguments: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a service; its log is in the folder."""
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(
            command_of(folder, *arguments), stdout=subprocess.PIPE, stderr=log, env={**os.environ, **environment}
        )
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=60)


def address_of(process: subprocess.Popen[bytes]) -> str:
    """Return the address on which a service on TCP says it listens."""
    assert process.stdout is not None
    return process.stdout.readline().decode().split()[-1]


def refused_start(folder: Path, *arguments: str) -> str:
    """Return why a service does not start."""
    done = subprocess.run(command_of(folder, *arguments), capture_output=True, timeout=60, check=False)
    assert done.returncode == 2
    return done.stderr.decode()


def service_id(client: ServiceClient) -> str:
    identity: str = client.get("/v1/info")["service_id"]
    return identity


class TestSocket:
    """A Unix socket belongs to its listener."""

    def test_live_socket_is_not_taken(self, folder: Path) -> None:
        """A second service on the same path does not start, and the first one remains reachable."""
        with running(folder, "--socket", f"{folder}/s"):
            client = ServiceClient(f"unix://{folder}/s", patience_s=30)
            first = service_id(client)

            assert "another process answers" in refused_start(folder, "--socket", f"{folder}/s")
            client.close()
            assert service_id(client) == first
            client.close()

    def test_stale_socket_is_replaced(self, folder: Path) -> None:
        """A socket left by a killed process is replaced, and the new one is private again."""
        with running(folder, "--socket", f"{folder}/s") as process:
            client = ServiceClient(f"unix://{folder}/s", patience_s=30)
            first = service_id(client)
            client.close()
            process.kill()
            process.wait(timeout=30)
        with running(folder, "--socket", f"{folder}/s"):
            assert service_id(client) != first
            assert (folder / "s").stat().st_mode & 0o777 == 0o600
            client.close()

    @pytest.mark.parametrize("kind", ["file", "folder", "link"])
    def test_other_things_are_left_alone(self, kind: str, folder: Path) -> None:
        """A path that is not a socket is never removed."""
        path = folder / "s"
        if kind == "file":
            path.write_text("precious", encoding="utf-8")
        elif kind == "folder":
            path.mkdir()
        else:
            path.symlink_to("elsewhere")

        assert "is not a socket" in refused_start(folder, "--socket", str(path))
        assert os.path.lexists(path)


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    """Return a certificate authority."""
    return trustme.CA()


@pytest.fixture
def tls(authority: trustme.CA, folder: Path) -> tuple[list[str], str]:
    """Return the arguments of a service with a certificate, and the file by which clients verify it."""
    authority.issue_cert("localhost", "127.0.0.1").private_key_and_cert_chain_pem.write_to_path(folder / "service.pem")
    authority.cert_pem.write_to_path(folder / "ca.pem")
    return ["--set", f"tls.certificate_file={folder}/service.pem"], f"{folder}/ca.pem"


class TestTls:
    """With a certificate, TCP is HTTPS."""

    def test_client_knows_service_by_its_authority(self, tls: tuple[list[str], str], folder: Path) -> None:
        """A client with the authority's certificate talks to the service, including its token."""
        arguments, ca_file = tls
        with running(folder, *arguments, DSTL_TOKEN="secret") as process:
            address = address_of(process)
            assert address.startswith("https://127.0.0.1:")
            client = ServiceClient(address, "secret", patience_s=30, ca_file=ca_file)

            assert service_id(client)
            client.close()

    def test_unknown_certificate_is_an_error_at_once(self, tls: tuple[list[str], str], folder: Path) -> None:
        """A service with an untrusted certificate gets no request; the message names the setting."""
        arguments, _ = tls
        with running(folder, *arguments) as process, pytest.raises(InvalidInputError, match="set ca_file"):
            ServiceClient(address_of(process), patience_s=600).get("/v1/info")

    def test_plain_request_is_not_answered(self, tls: tuple[list[str], str], folder: Path) -> None:
        """A request without TLS gets no answer."""
        arguments, _ = tls
        with running(folder, *arguments) as process:
            address = address_of(process).replace("https", "http")
            with pytest.raises(UnavailableError):
                ServiceClient(address, patience_s=0.1).get("/v1/info")

    def test_client_is_known_by_its_certificate(
        self, authority: trustme.CA, tls: tuple[list[str], str], folder: Path
    ) -> None:
        """A client with a certificate known to the service needs no token, and has exactly the rights of its name."""
        arguments, ca_file = tls
        for name, signer in (("orders", authority), ("forged", trustme.CA())):
            issued = signer.issue_cert("spark-orders.example")
            issued.private_key_and_cert_chain_pem.write_to_path(folder / f"{name}.pem")
        (folder / "access.toml").write_text(
            'certificates = [{ name = "spark-orders.example", role = "writer", jobs = ["orders"] }]', encoding="utf-8"
        )
        arguments = [*arguments, "--set", f"tls.client_ca_file={ca_file}", "--set", f"access_file={folder}/access.toml"]
        with running(folder, *arguments) as process:
            address = address_of(process)

            def ask(job: str, certificate: str | None, patience_s: float = 0.5) -> None:
                shown = (f"{folder}/{certificate}", None) if certificate else None
                client = ServiceClient(address, patience_s=patience_s, ca_file=ca_file, certificate=shown)
                try:
                    client.post(f"/v1/jobs/{job}/epochs", {"owner": "test"})
                finally:
                    client.close()

            assert accepts_health(address, ca_file)
            ask("orders", "orders.pem", patience_s=60)
            refusals: tuple[tuple[str, str | None, type[DstlError]], ...] = (
                ("others", "orders.pem", UnauthorizedError),
                ("orders", None, UnauthorizedError),
                ("orders", "forged.pem", UnavailableError),
            )
            for job, certificate, refusal in refusals:
                with pytest.raises(refusal):
                    ask(job, certificate)

    def test_certificate_is_exchanged_without_restart(
        self, authority: trustme.CA, tls: tuple[list[str], str], folder: Path
    ) -> None:
        """A connection opened after the file changed gets the new certificate."""
        arguments, ca_file = tls
        context = ssl.create_default_context(cafile=ca_file)

        def serial(address: str) -> str:
            host, _, port = address.removeprefix("https://").partition(":")
            with (
                socket.create_connection((host, int(port)), 30) as plain,
                context.wrap_socket(plain, server_hostname="127.0.0.1") as connection,
            ):
                return str((connection.getpeercert() or {})["serialNumber"])

        with running(folder, *arguments) as process:
            address = address_of(process)
            before = serial(address)
            renewed = authority.issue_cert("localhost", "127.0.0.1").private_key_and_cert_chain_pem
            renewed.write_to_path(folder / "new.pem")
            os.replace(folder / "new.pem", folder / "service.pem")

            wait_until(lambda: serial(address) != before)

    def test_silent_connections_make_room(self, tls: tuple[list[str], str], folder: Path) -> None:
        """B12: connections without a handshake count: the oldest are closed for new ones, and clients are served."""
        arguments, ca_file = tls
        with running(folder, *arguments, "--set", "http.connections_max=4") as process, ExitStack() as stack:
            address = address_of(process)
            assert accepts_health(address, ca_file)
            host, _, port = address.removeprefix("https://").partition(":")
            silent = [stack.enter_context(socket.create_connection((host, int(port)), 40)) for _ in range(20)]

            assert accepts_health(address, ca_file)
            assert [connection.recv(1) for connection in silent[:16]] == [b""] * 16

    def test_services_talk_over_tls(
        self, tls: tuple[list[str], str], folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A coordinator reaches another host's service through the same authority only."""
        monkeypatch.setattr("dstl_service.peers.client.CONNECT_TIMEOUT_S", 60.0)  # the service has only begun to listen
        arguments, ca_file = tls
        ref = ChangeSetRef("op", 0, 1, 1, 0, 0, 1, "gone")
        with running(folder, *arguments, DSTL_TOKEN="secret") as process:
            address = address_of(process)
            client = ServiceClient(address, "secret", patience_s=30, ca_file=ca_file)
            client.post("/v1/jobs/job/epochs", {"owner": "test"})
            client.close()
            trust = partial(ssl.create_default_context, cafile=ca_file)
            trusting = PeerClient(lambda: "secret", 30, trust)
            with pytest.raises(LostChangesError, match="process that is gone"):
                trusting.persist(address, "job", [ref], wait=True)
            with pytest.raises(LostChangesError, match="cannot be reached"):
                PeerClient(lambda: "secret", 30).persist(address, "job", [ref], wait=True)
            with pytest.raises(UnauthorizedError):
                PeerClient(lambda: None, 30, trust).persist(address, "job", [ref], wait=True)


class TestToken:
    """Tokens are replaced while service and clients run, and are never shown."""

    def test_token_is_exchanged_without_pause(self, folder: Path) -> None:
        """A new first line is accepted beside the old one; once the old one is removed, a client uses the new one."""
        path = folder / "token"
        path.write_text("old-token\n", encoding="utf-8")
        with running(folder, "--token-file", str(path)) as process:
            address = address_of(process)
            client = ServiceClient(address, lambda: path.read_text(encoding="utf-8").split()[0], patience_s=30)
            assert service_id(client)
            path.write_text("new-token\nold-token\n", encoding="utf-8")
            wait_until(lambda: accepts(address, "new-token"))
            assert accepts(address, "old-token")
            path.write_text("new-token\n", encoding="utf-8")
            wait_until(lambda: not accepts(address, "old-token"))

            assert service_id(client)
            client.close()
        log = (folder / "log").read_text(encoding="utf-8")
        assert ("token file read again" in log, "old-token" in log, "new-token" in log) == (True, False, False)

    def test_log_holds_no_secret(self, folder: Path) -> None:
        """No failure puts a token or credentials into the log."""
        secrets = {"DSTL_TOKEN": "tok-5ecret", "AWS_SECRET_ACCESS_KEY": "key-5ecret", "AWS_ACCESS_KEY_ID": "id-5ecret"}
        with running(folder, **secrets) as process:
            address = address_of(process)
            client = ServiceClient(address, "tok-5ecret", patience_s=30)
            client.post("/v1/jobs/job/epochs", {"owner": "test"})
            for path in ("/none?token=query-5ecret", "/v1/jobs/a%2Fb/restore"):
                with pytest.raises(DstlError):
                    client.get(path)
            assert not accepts(address, "other-5ecret")
            client.close()

        log = (folder / "log").read_text(encoding="utf-8")
        assert "job opened" in log
        assert "5ecret" not in log


class TestLimits:
    """A connection cannot make the service hold unlimited data."""

    @pytest.mark.parametrize(
        "pieces",
        [
            [b"GET /health HTTP/1.1\r\nhost: x\r\nfiller: ", b"x" * 1024],
            [b"GET /health?", b"x" * 1024],
            [b"GET /health HTTP/1.1\r\n", b"name: value\r\n" * 80],
        ],
        ids=["value", "address", "many"],
    )
    def test_endless_head_is_cut_off(self, pieces: Sequence[bytes], folder: Path) -> None:
        """A head that does not end is refused after 64 KiB, and the service continues."""
        with running(folder) as process:
            address = address_of(process)
            host, _, port = address.removeprefix("http://").rpartition(":")
            first, more = pieces
            with socket.create_connection((host, int(port)), timeout=30) as connection:
                answer = b""
                try:
                    connection.sendall(first)
                    for _ in range(10_000):  # ten megabytes
                        connection.sendall(more)
                    answer = connection.recv(100)
                except OSError:  # cut off while the client still sends
                    answer = b"HTTP/1.1 400"

            assert answer.startswith(b"HTTP/1.1 400") or answer == b""
            assert service_id(ServiceClient(address, patience_s=30))

    def test_long_head_that_ends_is_taken(self, folder: Path) -> None:
        """A long address within the limit is accepted."""
        with running(folder) as process:
            client = ServiceClient(address_of(process), patience_s=30)

            assert client.get(f"/v1/info?filler={'x' * 50_000}")["service_id"]
            client.close()


def accepts_health(address: str, ca_file: str) -> bool:
    """Return whether the service answers."""
    client = ServiceClient(address, patience_s=40, ca_file=ca_file)  # asyncio gives up handshakes after 60 s
    try:
        return bool(client.get("/health"))
    finally:
        client.close()


def accepts(address: str, token: str) -> bool:
    """Return whether the service accepts this token."""
    client = ServiceClient(address, token, patience_s=30)
    try:
        client.get("/v1/info")
    except UnauthorizedError:
        return False
    finally:
        client.close()
    return True
