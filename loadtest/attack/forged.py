"""Forged handles, epochs and folders: none is trusted, and nothing of another job is touched."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from dstl_service.wire import BatchFigures
from loadtest.attack.case import Case, no_bug, refused, with_status
from loadtest.attack.raw import Answer
from loadtest.attack.target import NEIGHBOUR, Attacked, complete_body
from storage.checksum import checksum64

_GROUP = "forged handles and epochs"
_FAR = 2**53 - 1
_FIGURES = {field.name: 1 for field in fields(BatchFigures)}


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


_Attack = Callable[[AttackerJob], str | None]


def _case(name: str, attack: _Attack) -> Case:
    job = "forged-" + re.sub(r"\W+", "-", name)[:40]  # one each, so that a fence affects one case only
    return Case(_GROUP, name, lambda target: attack(AttackerJob(target, job)), known=(job,))


def _neighbours_object(job: AttackerJob) -> str:
    objects = [path for path in job.target.storage.rglob("*") if path.is_file() and "segments" in str(path)]
    return str(objects[0].relative_to(job.target.storage)) if objects else "segments/none"


def _handles() -> dict[str, _Attack]:
    keys = {
        "object that is not there": "{job}/segments/host/01a203bf2b0b7000b75cfbed34feab64.seg",
        "object outside": "{job}/segments/../../../../../../etc/passwd",
        "absolute key": "/etc/passwd",
        "key with NUL": "{job}/segments/host/\0.seg",
        "empty key": "",
        "key of a folder": "{job}/segments/",
        "key of 100,000 letters": "{job}/segments/" + "a" * 100_000,
    }

    def naming(key: str) -> _Attack:
        return lambda job: refused(job.complete([job.ref(handle=job.handle(key.format(job=job.name)))]))

    found: dict[str, _Attack] = {f"handle: {name}": naming(key) for name, key in keys.items()}
    return found | {
        "handle: the neighbour's object": lambda job: refused(
            job.complete([job.ref(handle=job.handle(f"{job.name}/segments/../../{_neighbours_object(job)}"))])
        ),
        "handle: of the neighbour's job": lambda job: refused(
            job.complete([job.ref(handle=job.handle(_neighbours_object(job), job=NEIGHBOUR))])
        ),
        "handle: offset below zero": lambda job: refused(job.complete([job.ref(handle=job.handle("a", offset=-1))])),
        "handle: size beyond 53 bits": lambda job: refused(job.complete([job.ref(handle=job.handle("a", size=2**60))])),
        "handle: a list": lambda job: refused(job.complete([job.ref(handle=[])])),
        "handle: nested": lambda job: refused(job.complete([job.ref(handle={"a": {"b": []}})])),
        "set that was never handed over": lambda job: refused(job.complete([job.ref()])),
        "set of this service that it never had": lambda job: refused(
            job.complete([job.ref(service_id=_service_id(job.target))])
        ),
        "invalid snapshot": lambda job: no_bug(job.complete([], materializations=[{"a": 1}])),
        "base of another job": lambda job: refused(job.complete([], base=_neighbours_checkpoint(job))),
        "base that is not there": lambda job: refused(job.complete([], base={"id": 7, "generation": 0, "uid": "x"})),
        "peer at port 99999": lambda job: refused(job.complete([job.ref(service_url="http://127.0.0.1:99999")])),
        "peer with a user": lambda job: refused(job.complete([job.ref(service_url="http://a:b@127.0.0.1:1")])),
        "peer of another scheme": lambda job: refused(job.complete([job.ref(service_url="file:///etc/passwd")])),
    }


def _neighbours_checkpoint(job: AttackerJob) -> dict[str, Any] | None:
    return None if job.target.neighbour is None else job.target.neighbour.last_ref


def _service_id(target: Attacked) -> str:
    return str(answered(target.ask("GET", "/v1/info"))["service_id"])


def answered(answer: Answer) -> Any:
    """Return the JSON document of an answer."""
    return json.loads(answer.data.partition(b"\r\n\r\n")[2])


def _far_epoch(job: AttackerJob) -> str | None:
    return refused(job.append(_FAR)) or job.works()


def _far_epoch_and_wrong_checksum(job: AttackerJob) -> str | None:
    return refused(job.append(_FAR, checksum="1" * 16)) or job.works()


def _next_epoch(job: AttackerJob) -> str | None:
    return refused(job.append(job.epoch + 1)) or job.works()


def _far_begin(job: AttackerJob) -> str | None:
    return refused(job.post("checkpoints/0/begin", {"epoch": _FAR})) or job.works()


def _far_persist(job: AttackerJob) -> str | None:
    return refused(job.post("persist", {"epoch": _FAR, "refs": [job.ref(epoch=_FAR)]})) or job.works()


def _far_abort(job: AttackerJob) -> str | None:
    job.post("checkpoints/0/abort", {"epoch": _FAR})
    return job.works()


def _older_epoch(job: AttackerJob) -> str | None:
    older = job.epoch
    newer = AttackerJob(job.target, job.name)
    return refused(newer.post("checkpoints/0/complete", complete_body(older, 0, None, []))) or newer.works()


def _unknown_job(target: Attacked) -> str | None:
    job = AttackerJob(target, "forged")
    return refused(job.append(1, job="nobody", preemptive="true")) or refused(
        target.ask("POST", "/v1/jobs/nobody/checkpoints/0/begin", b'{"epoch":1}')
    )


def _unknown_job_at(method: str, place: str, body: bytes) -> Callable[[Attacked], str | None]:
    return lambda target: refused(target.ask(method, f"/v1/jobs/nobody{place}", body))


def _snapshot_of(path: str) -> _Attack:
    def run(job: AttackerJob) -> str | None:
        before = sorted(Path(path).iterdir()) if Path(path).is_dir() else []
        version = job.checkpoint()
        body = {"operator": "op", "first_key_group": 0, "last_key_group": 127, "version": version, "path": path}
        answer = job.post("materializations", body)
        after = sorted(Path(path).iterdir()) if Path(path).is_dir() else []
        return "the folder was changed" if before and not after else refused(answer) or no_bug(answer)

    return run


def _linked_snapshot(job: AttackerJob) -> str | None:
    with tempfile.TemporaryDirectory() as folder:
        victim = Path(folder) / "victim"
        victim.mkdir()
        (victim / "CURRENT").write_text("a")
        link = Path(folder) / "x.snapshot-1"
        link.symlink_to(victim)
        answer = _snapshot_of(str(link))(job)
        return answer or (None if (victim / "CURRENT").exists() else "the link's target was emptied")


def cases() -> list[Case]:
    """Return the cases of this group."""
    found = [_case(name, attack) for name, attack in _handles().items()]
    own: dict[str, _Attack] = {
        "epoch of 2^53-1": _far_epoch,
        "epoch of 2^53-1 and a wrong checksum": _far_epoch_and_wrong_checksum,
        "next epoch": _next_epoch,
        "begin with an epoch of 2^53-1": _far_begin,
        "persist with an epoch of 2^53-1": _far_persist,
        "abort with an epoch of 2^53-1": _far_abort,
        "older epoch": _older_epoch,
        "reserved operator": lambda job: refused(job.append(job.epoch, operator="_note")),
        "checkpoint out of turn": lambda job: refused(
            job.post("checkpoints/7/complete", complete_body(job.epoch, 7, None, []))
        ),
        "savepoint of a checkpoint that is not there": lambda job: refused(
            job.target.ask("PUT", f"/v1/jobs/{job.name}/savepoints/s", b'{"checkpoint_id":77}')
        ),
        "snapshot of the root": _snapshot_of("/"),
        "snapshot of /etc": _snapshot_of("/etc"),
        "snapshot of a file": _snapshot_of("/etc/passwd"),
        "snapshot of a relative folder": _snapshot_of("../.."),
        "snapshot of nothing": _snapshot_of("/no/such/folder"),
        "snapshot through a link": _linked_snapshot,
    }
    found += [_case(name, attack) for name, attack in own.items()]
    found.append(Case(_GROUP, "unknown job: append", _unknown_job, known=("forged",)))
    places = {
        "collect": ("POST", "/garbage-collection?dry_run=false", b""),
        "batch": ("POST", "/batches", json.dumps(_FIGURES).encode()),
        "savepoint": ("PUT", "/savepoints/s", b"{}"),
        "delete a savepoint": ("DELETE", "/savepoints/s", b""),
        "restore": ("GET", "/restore?operator=op&first_key_group=0&last_key_group=1&to=0.0.a", b""),
        "complete": ("POST", "/checkpoints/0/complete", json.dumps(complete_body(1, 0, None, [])).encode()),
    }
    return found + [Case(_GROUP, f"unknown job: {name}", _unknown_job_at(*asked)) for name, asked in places.items()]
