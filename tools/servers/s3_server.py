"""A real S3 server: VersityGW, which keeps objects in plain files."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import boto3

from tools.servers.programs import ServerProcess, go_program
from tools.servers.versions import VERSITYGW_MODULE, VERSITYGW_VERSION

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client


def s3_program() -> Path:
    """Return the server's program, built if missing."""
    return go_program("versitygw", VERSITYGW_MODULE, VERSITYGW_VERSION)


class S3Server(ServerProcess):
    """
    A VersityGW. Its objects survive a stop.

    Args:
        data_dir: Folder of the objects; by default a temporary folder that is deleted at the end.
        address: The IPv4 address on which it listens.
        access_log: A file that gets a line for each request.
    """

    access_key = "dstl-test-access"
    secret_key = "dstl-test-secret"  # noqa: S105 - for a server that lives as long as a test
    region = "us-east-1"

    def __init__(
        self, data_dir: Path | None = None, address: str = "127.0.0.1", access_log: Path | None = None
    ) -> None:
        self._own_folder = (
            None if data_dir else tempfile.TemporaryDirectory(prefix="dstl-s3-", ignore_cleanup_errors=True)
        )
        folder = data_dir or Path(self._own_folder.name if self._own_folder else "")
        self.data_dir = folder / "buckets"
        self._access_log = access_log
        super().__init__("S3 server", folder / "server.log", address)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        if self._own_folder is not None:
            self._own_folder.cleanup()

    def command(self, port: int) -> tuple[Sequence[str], Mapping[str, str]]:
        """Serve the data folder."""
        program = s3_program()
        self.data_dir.mkdir(parents=True, exist_ok=True)
        logged = ["--access-log", str(self._access_log)] if self._access_log else []
        command = [str(program), "--port", f"{self.address}:{port}", *logged, "posix", str(self.data_dir)]
        return command, {"ROOT_ACCESS_KEY": self.access_key, "ROOT_SECRET_KEY": self.secret_key}

    def env(self, endpoint_url: str | None = None) -> dict[str, str]:
        """
        Return the environment variables by which boto3 finds this server.

        Args:
            endpoint_url: URL of a proxy in front of it; its own by default.
        """
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_ENDPOINT_URL_S3": endpoint_url or self.endpoint_url,
            "AWS_REGION": self.region,
            "AWS_DEFAULT_REGION": self.region,
        }

    def create_bucket(self, name: str) -> None:
        """Create an empty bucket; the name has 3-63 characters of [a-z0-9-]."""
        client = self.client()
        client.create_bucket(Bucket=name)
        client.close()

    def client(self) -> S3Client:
        """Return a client of plain boto3; the caller closes it."""
        session = boto3.session.Session(self.access_key, self.secret_key, region_name=self.region)
        return session.client("s3", endpoint_url=self.endpoint_url)
