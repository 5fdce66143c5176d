"""
A bucket as configured by users: server, region and encryption in the settings file, credentials found by boto3.

A failure means that an auto-started sidecar, or a command on the storage, cannot reach the configured bucket.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest

from backend_client.service.job_session import auto_started_sidecar, connect
from backend_client.settings import BackendSettings
from storage.errors import UnavailableError
from tests.sidecars import end_sidecars
from tools.servers.s3_server import S3Server
from tools.servers.service.job_driver import JobDriver

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    """Return an S3 server that no variable names."""
    with S3Server() as made:
        made.create_bucket("bucket")
        yield made


@pytest.fixture
def folder(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a folder with a settings file and a profile; the environment names only the profile."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL_S3", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    with tempfile.TemporaryDirectory(prefix="d3") as name:
        path = Path(name)
        (path / "dstl.toml").write_text(
            f'[s3]\nendpoint_url = "{server.endpoint_url}"\nregion = "{server.region}"\naddressing_style = "path"\n',
            encoding="utf-8",
        )
        (path / "credentials").write_text(
            f"[streaming]\naws_access_key_id = {server.access_key}\naws_secret_access_key = {server.secret_key}\n",
            encoding="utf-8",
        )
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path / "credentials"))
        monkeypatch.setenv("AWS_PROFILE", "streaming")
        yield path


def make_checkpoint(settings: BackendSettings) -> None:
    """Start the sidecar with these settings, store one checkpoint through it, and stop it."""
    client = connect(settings)
    sidecar = auto_started_sidecar(settings)
    try:
        job = JobDriver(client)
        assert job.persist(job.append(b"changes"))
    finally:
        client.close()
        end_sidecars(Path(sidecar.folder), signal.SIGTERM)


@pytest.mark.parametrize("way", ["option", "environment"])
def test_sidecar_that_starts_itself_finds_bucket(
    way: str, server: S3Server, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The settings file reaches an auto-started sidecar through an option of the backend or through the environment."""
    config = str(folder / "dstl.toml")
    if way == "environment":
        monkeypatch.setenv("DSTL_CONFIG", config)
    option = config if way == "option" else None
    settings = BackendSettings(f"s3://bucket/{way}", "job", local_dir=str(folder), sidecar_config_file=option)

    make_checkpoint(settings)
    client = boto3.client("s3", endpoint_url=server.endpoint_url, region_name=server.region)
    keys = [item["Key"] for item in client.list_objects_v2(Bucket="bucket", Prefix=f"{way}/job/")["Contents"]]
    client.close()
    assert any(key.startswith(f"{way}/job/segments/") for key in keys)
    log = Path(auto_started_sidecar(settings).log_path).read_text(encoding="utf-8")
    assert server.secret_key not in log


def test_commands_take_the_same_settings(folder: Path) -> None:
    """Commands on a job's storage read the same file."""
    settings = BackendSettings(
        "s3://bucket/cli", "job", local_dir=str(folder), sidecar_config_file=f"{folder}/dstl.toml"
    )
    make_checkpoint(settings)
    command = [sys.executable, "-m", "dstl_service", "gc", "--config", f"{folder}/dstl.toml"]
    done = subprocess.run(
        [*command, "--storage", "s3://bucket/cli", "job"], capture_output=True, text=True, timeout=60, check=False
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert "1 objects" in done.stdout


def test_missing_credentials_are_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A profile without credentials stops the first request with a message that says so."""
    (folder / "credentials").write_text("[streaming]\n", encoding="utf-8")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setattr("backend_client.service.client._LAST_TRY_S", 60.0)  # the first answer counts
    settings = BackendSettings(
        "s3://bucket/none", "job", local_dir=str(folder), sidecar_config_file=f"{folder}/dstl.toml", patience_s=1
    )

    with pytest.raises(UnavailableError, match="credentials"):
        make_checkpoint(settings)
