"""One real S3 server for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tools.servers.s3_server import S3Server


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """Start a VersityGW, and let boto3 find it through the environment."""
    with S3Server() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.env().items():
            patch.setenv(name, value)
        yield server
