"""A job of the attacker's own, from which it sends forged requests."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import urlencode

from loadtest.attack.harness.case import with_status
from loadtest.attack.harness.raw import Answer
from loadtest.attack.harness.target import Attacked, complete_body
from storage.checksum import checksum64


class AttackerJob:
    """A job of the attacker's own, opened like any other."""

    def __init__(self, target: Attacked, name: str = "forged") -> None:
        self.target, self.name = target, name
        answer = self.post("epochs", {"owner": "attacker"})
        self.epoch = answered(answer)["epoch"]

    def post(self, place: str, body: Any) -> Answer:
        return self.target.ask("POST", f"/v1/jobs/{self.name}/{place}", json.dumps(body).encode())

    def append(self, epoch: int, payload: bytes = b"payload", *, job: str | None = None, **changed: Any) -> Answer:
        checksum = {"checksum": f"{checksum64(payload):016x}"}
        return self.target.ask("POST", place_of_sets(job or self.name, epoch, **(checksum | changed)), payload)

    def place_of_sets(self) -> str:
        """Return the path to which a legitimate set of this job is sent."""
        return place_of_sets(self.name, self.epoch)

    def works(self) -> str | None:
        """Return a defect if the job's own driver is fenced."""
        begun = self.post("checkpoints/0/begin", {"epoch": self.epoch})
        return with_status(begun, 200) or with_status(self.append(self.epoch), 200)

    def complete(self, refs: list[dict[str, Any]], **changed: Any) -> Answer:
        self.post("checkpoints/0/begin", {"epoch": self.epoch})
        return self.post("checkpoints/0/complete", {**complete_body(self.epoch, 0, None, refs), **changed})

    def checkpoint(self) -> str:
        """Complete a valid checkpoint; return its reference."""
        self.post("checkpoints/0/begin", {"epoch": self.epoch})
        ref = answered(self.append(self.epoch))
        made = answered(self.post("checkpoints/0/complete", complete_body(self.epoch, 0, None, [ref])))["ref"]
        return f"{made['id']}.{made['generation']}.{made['uid']}"

    def ref(self, **changed: Any) -> dict[str, Any]:
        values = {"operator": "op", "checkpoint_id": 0, "epoch": self.epoch, "attempt": 1, "partition": 0, "sqn": 9}
        values |= {"size_bytes": 10, "service_id": "another", "service_url": None, "handle": None}
        return {**values, "checksum": "0" * 16, **changed}

    def handle(self, key: str, **changed: Any) -> dict[str, Any]:
        id_ = {"job": self.name, "operator": "op", "checkpoint": 0, "epoch": self.epoch, "attempt": 1}
        id_ |= {"partition": 0, "sqn": 9}
        values = {
            "object": key,
            "object_size": 100,
            "offset": 0,
            "size": 10,
            "key_groups": "00000-00127",
            "count": 1,
            "checksum": "0" * 16,
        }
        return {**id_, **values, **changed}


def place_of_sets(job: str, epoch: int, **changed: Any) -> str:
    """Return the path to which a set is sent."""
    values = {"operator": "op", "checkpoint_id": 0, "epoch": epoch, "attempt": 1, "partition": 0, "sqn": 1}
    values |= {"first_key_group": 0, "last_key_group": 127, "count": 1, "checksum": "0" * 16}
    return f"/v1/jobs/{job}/change-sets?{urlencode(values | changed)}"


def answered(answer: Answer) -> Any:
    """Return the JSON document of an answer."""
    return json.loads(answer.data.partition(b"\r\n\r\n")[2])
