"""Forged forks, reads and requests for a parallelism: none reaches another job, and none makes one that may not be."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from loadtest.attack.harness.attacker_job import AttackerJob, answered
from loadtest.attack.harness.case import Case, refused
from loadtest.attack.harness.target import NEIGHBOUR, Attacked

_GROUP = "forks, reads and parallelism"
_FAR = 2**53 - 1
_DIGITS = b"9" * 5_000

_Attack = Callable[[AttackerJob], str | None]


def _case(name: str, attack: _Attack) -> Case:
    job = "forks-" + re.sub(r"\W+", "-", name)[:40]
    return Case(_GROUP, name, lambda target: attack(AttackerJob(target, job)), known=(job,))


def _fork(name: str, body: bytes = b"{}") -> _Attack:
    """Fork a job that has a checkpoint."""

    def run(job: AttackerJob) -> str | None:
        job.checkpoint()
        return refused(job.target.ask("POST", f"/v1/jobs/{job.name}/forks/{name.format(job=job.name)}", body))

    return run


def _fork_onto_a_neighbour(job: AttackerJob) -> str | None:
    """The neighbour is a job of its own, and goes on: `judge` sees its batches."""
    return _fork(NEIGHBOUR)(job)


def _repeated_fork_at_another_checkpoint(job: AttackerJob) -> str | None:
    job.checkpoint()
    path, fork = f"/v1/jobs/{job.name}/forks/", f"{job.name}.fork"
    answered(job.target.ask("POST", path + fork, b"{}"))
    return refused(job.target.ask("POST", path + fork, b'{"checkpoint_id":7}')) or refused(
        job.target.ask("POST", f"/v1/jobs/{NEIGHBOUR}/forks/{fork}", b"{}")
    )


def _read(**changed: Any) -> _Attack:
    return lambda job: refused(job.post("read", {"epoch": job.epoch, "refs": [job.ref()], **changed}))


def _read_handle(key: str, **changed: Any) -> _Attack:
    def run(job: AttackerJob) -> str | None:
        handle = job.handle(key.format(job=job.name, neighbour=_object_of_a_neighbour(job)), **changed)
        return refused(job.post("read", {"epoch": job.epoch, "refs": [job.ref(handle=handle)]}))

    return run


def _object_of_a_neighbour(job: AttackerJob) -> str:
    found = [path for path in job.target.storage.rglob("*.seg") if NEIGHBOUR in str(path)]
    return str(found[0].relative_to(job.target.storage)) if found else f"{NEIGHBOUR}/segments/none.seg"


def _parallelism(operator: str, body: bytes) -> _Attack:
    def run(job: AttackerJob) -> str | None:
        job.checkpoint()
        return refused(job.target.ask("PUT", f"/v1/jobs/{job.name}/operators/{operator}/parallelism", body))

    return run


def _of_nobody(method: str, place: str, body: bytes) -> Callable[[Attacked], str | None]:
    return lambda target: refused(target.ask(method, f"/v1/jobs/nobody{place}", body))


def _forks() -> dict[str, _Attack]:
    names = {
        "a path": "..%2f..%2fescaped",
        "a hidden name": ".hidden",
        "a name of the registry": "@deleted",
        "the job itself": "{job}",
        "a name of 5,000 letters": "a" * 5_000,
        "a name with a line break": "a%0ab",
        "a name with NUL": "a%00b",
    }
    bodies = {
        "checkpoint -1": b'{"checkpoint_id":-1}',
        "checkpoint 2^53-1": b'{"checkpoint_id":%d}' % _FAR,
        "checkpoint of 5,000 digits": b'{"checkpoint_id":' + _DIGITS + b"}",
        "savepoint with a path": b'{"savepoint":"../x"}',
        "savepoint and checkpoint": b'{"savepoint":"s","checkpoint_id":0}',
        "no key groups": b'{"max_parallelism":0}',
        "more key groups than there are": b'{"max_parallelism":32769}',
        "key groups of 5,000 digits": b'{"max_parallelism":' + _DIGITS + b"}",
        "key groups as a list": b'{"max_parallelism":[1]}',
        "a list": b"[]",
    }
    found = {f"fork into {name}": _fork(path) for name, path in names.items()}
    return found | {f"fork at {name}": _fork("fork", body) for name, body in bodies.items()}


def cases() -> list[Case]:
    """Return the cases of this group."""
    own: dict[str, _Attack] = {
        **_forks(),
        "fork onto a neighbour": _fork_onto_a_neighbour,
        "fork again at another checkpoint, and of another job": _repeated_fork_at_another_checkpoint,
        "read: set that was never handed over": _read(),
        "read: far epoch": _read(epoch=_FAR),
        "read: no list": _read(refs={"a": 1}),
        "read: the neighbour's object": _read_handle("{neighbour}"),
        "read: the neighbour's object by a path": _read_handle("{job}/segments/../../{neighbour}"),
        "read: of the neighbour's job": _read_handle("{neighbour}", job=NEIGHBOUR),
        "read: object outside": _read_handle("{job}/segments/../../../../../../etc/passwd"),
        "read: a peer of another scheme": lambda job: refused(
            job.post("read", {"epoch": job.epoch, "refs": [job.ref(service_url="file:///etc/passwd")]})
        ),
        "read: a peer that nobody announced": lambda job: refused(
            job.post("read", {"epoch": job.epoch, "refs": [job.ref(service_url="http://169.254.169.254:80")]})
        ),
        "parallelism of an unknown operator": _parallelism("nobody", b'{"parallelism":2}'),
        "parallelism of a path": _parallelism("..%2f..%2fx", b'{"parallelism":2}'),
        "parallelism of zero": _parallelism("op", b'{"parallelism":0}'),
        "parallelism of 5,000 digits": _parallelism("op", b'{"parallelism":' + _DIGITS + b"}"),
        "parallelism as text": _parallelism("op", b'{"parallelism":"2"}'),
    }
    places = {
        "fork": ("POST", "/forks/x", b"{}"),
        "read": ("POST", "/read", json.dumps({"epoch": 1, "refs": []}).encode()),
        "parallelism": ("PUT", "/operators/op/parallelism", b'{"parallelism":2}'),
    }
    found = [
        Case(case.group, case.name, case.run, known=(*case.known, *(f"{name}.fork" for name in case.known)))
        for case in (_case(name, attack) for name, attack in own.items())
    ]
    return found + [Case(_GROUP, f"nobody's {name}", _of_nobody(*asked)) for name, asked in places.items()]
