"""How tests wait until other hosts can call a service: it announces its address only after the store has it."""

from __future__ import annotations

from itertools import count

from backend_client.service.client import ServiceClient
from tests.waiting import wait_until
from tools.servers.service.job_driver import JobDriver


def wait_until_announced(client: ServiceClient, host_id: str) -> None:
    """Return when the references that the service returns carry its address; uses a job named after the host."""
    job, numbers = JobDriver(client, f"announced-{host_id}"), count()
    wait_until(lambda: job.append(b"x", next(numbers)).service_url, what=f"the address of {host_id}")
