"""A job on the sidecar from a module's fixture of that name."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.backend_client.materializing_job import Job, Sidecar


@pytest.fixture
def job(sidecar: Sidecar) -> Iterator[Job]:
    """Return a job; it is closed before the sidecar ends."""
    made = Job(sidecar)
    yield made
    made.close()
