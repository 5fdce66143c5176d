"""How tests wait until a service can be asked by others: it gives its address out when the store has it, not before."""

from __future__ import annotations

from itertools import count

from backend_client.service.client import ServiceClient
from dstl_service.wire import LogTarget
from storage.checksum import checksum64
from storage.key_groups import KeyGroupRange
from tests.waiting import wait_until


def wait_until_announced(client: ServiceClient, host_id: str) -> None:
    """Return when sets that the service receives carry its address; a job of the host's name is opened for that."""
    job, numbers = f"announced-{host_id}", count()
    epoch = client.post(f"/v1/jobs/{job}/epochs", {"owner": "test"})["epoch"]
    target = LogTarget(job, "op", 0, epoch, 1, 0, KeyGroupRange(0, 127))

    def address() -> str | None:
        return client.append(target, next(numbers), b"x", checksum64(b"x"), 1, preemptive=False).service_url

    wait_until(address, what=f"the address of {host_id}")
