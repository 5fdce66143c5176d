"""Forged handles, epochs and folders: none is trusted, and nothing of another job is touched."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from dstl_service.wire import BatchFigures
from loadtest.attack.harness.attacker_job import AttackerJob, answered
from loadtest.attack.harness.case import Case, no_bug, refused
from loadtest.attack.harness.target import NEIGHBOUR, Attacked, complete_body

_GROUP = "forged handles and epochs"
_FAR = 2**53 - 1
_FIGURES = {field.name: 1 for field in fields(BatchFigures)}


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
