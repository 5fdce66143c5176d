"""A job from the view of its driver and tasks: append, persist, complete, and restore to compare."""

from __future__ import annotations

import socket
from dataclasses import asdict
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from backend_client.service.client import ServiceClient
from dstl_service.wire import ChangeSetRef, CheckpointRef, LogTarget
from storage.checksum import checksum64
from storage.key_groups import KeyGroupRange

OPERATOR = "op"
KEY_GROUPS = KeyGroupRange(0, 127)


class LoadJob:
    """
    One job with an epoch of its own. Payloads are opaque to the service, so any bytes will do.

    Args:
        address: Address of the service.
        name: Name of the job.
        patience_s: How long a request is retried.
    """

    def __init__(self, address: str, name: str, patience_s: float = 120.0) -> None:
        self.name = name
        self._address = address
        self._patience_s = patience_s
        self.client = self.new_client()
        self.epoch: int = self.client.post(f"/v1/jobs/{name}/epochs", {"owner": "load"})["epoch"]

    def new_client(self) -> ServiceClient:
        """Return a client for another thread."""
        return ServiceClient(self._address, patience_s=self._patience_s)

    def append(
        self,
        client: ServiceClient,
        checkpoint_id: int,
        partition: int,
        sqn: int,
        payload: bytes,
        *,
        preemptive: bool = False,
    ) -> ChangeSetRef:
        """Append a set of a partition's first attempt."""
        target = LogTarget(self.name, OPERATOR, checkpoint_id, self.epoch, 1, partition, KEY_GROUPS)
        return client.append(target, sqn, payload, checksum64(payload), 1, preemptive=preemptive)

    def complete(self, checkpoint_id: int, base: dict[str, Any] | None, refs: list[ChangeSetRef]) -> dict[str, Any]:
        """Complete a checkpoint of these sets; return its reference."""
        body = {
            "epoch": self.epoch,
            "uid": f"e{self.epoch}c{checkpoint_id}",
            "base": base,
            "refs": [asdict(ref) for ref in refs],
            "operators": [],
            "query_id": "",
            "offsets": "",
        }
        path = f"/v1/jobs/{self.name}/checkpoints/{checkpoint_id}/complete"
        ref: dict[str, Any] = self.client.post(path, body)["ref"]
        return ref

    def frames(self, ref: dict[str, Any]) -> list[tuple[dict[str, Any], bytes]]:
        """Return the frames that restore an empty table to a checkpoint."""
        want = CheckpointRef(**ref).to_text()
        with self.client.restore(self.name, OPERATOR, KEY_GROUPS, None, want) as frames:
            return list(frames)

    def restored(self, ref: dict[str, Any]) -> list[bytes]:
        """Return the payloads of these frames."""
        return [payload for header, payload in self.frames(ref) if header["kind"] == "segment"]


def read_metrics(socket_path: Path) -> dict[str, float]:
    """Return the metrics of a service at a Unix socket: the sum over all labels, by sample name."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(socket_path))
        connection.sendall(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        with connection.makefile("rb") as stream:
            _, _, text = stream.read().partition(b"\r\n\r\n")
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return sums
