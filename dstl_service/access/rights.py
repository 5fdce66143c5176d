"""
Roles, and the right that each route requires. Pure.

    role       on named jobs, or on all                                     and on the service as a whole
    ---------  -----------------------------------------------------------  --------------------------------
    reader     see checkpoints and savepoints                               metrics and info, if of all jobs
    operator   the same; create and delete savepoints, collect, abort,      metrics and info, if of all jobs
               rescale
    writer     see the same; run: take over, append, complete, restore;     metrics and info, if of all jobs
               fork one of its jobs into another one of its jobs
    full       everything, also what no other role may do

A route that is not in the table requires full rights, so a new route is closed until it is added.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from dstl_service.wire import NAME
from storage.errors import InvalidInputError

RoleName = Literal["reader", "operator", "writer", "full"]

_JOBS = re.compile(rf"{NAME}\*?|\*")


class Right(enum.Enum):
    """The rights that a route requires."""

    NONE = "nothing: anybody may ask"
    KNOWN = "to be known, in whatever role"
    LOOK = "to see what there is of the job, or of all jobs"
    RUN = "to run the job: to read and write its state"
    OPERATE = "to operate the job"
    FULL = "all rights"


_ROLES: Mapping[str, frozenset[Right]] = {
    "reader": frozenset({Right.LOOK}),
    "operator": frozenset({Right.LOOK, Right.OPERATE}),
    "writer": frozenset({Right.LOOK, Right.RUN}),
}

_JOB = "/v1/jobs/{job}"

ROUTES: Mapping[tuple[str, str], tuple[Right, ...]] = {
    # method and path                                       any one of these suffices
    ("GET", "/health"): (Right.NONE,),
    ("GET", "/ready"): (Right.KNOWN,),
    ("GET", "/openapi.json"): (Right.KNOWN,),
    ("GET", "/metrics"): (Right.LOOK,),
    ("GET", "/v1/info"): (Right.LOOK,),
    ("GET", _JOB): (Right.LOOK,),
    ("GET", f"{_JOB}/checkpoints"): (Right.LOOK,),
    ("GET", f"{_JOB}/checkpoints/{{checkpoint_id}}"): (Right.LOOK,),
    ("GET", f"{_JOB}/savepoints"): (Right.LOOK,),
    ("GET", f"{_JOB}/restore"): (Right.RUN,),
    ("POST", f"{_JOB}/epochs"): (Right.RUN,),
    ("POST", f"{_JOB}/change-sets"): (Right.RUN,),
    ("POST", f"{_JOB}/persist"): (Right.RUN,),
    ("POST", f"{_JOB}/read"): (Right.RUN,),
    ("POST", f"{_JOB}/batches"): (Right.RUN,),
    ("POST", f"{_JOB}/link-address"): (Right.RUN,),
    ("POST", f"{_JOB}/links"): (Right.RUN,),
    ("GET", f"{_JOB}/silent-hosts"): (Right.RUN,),
    ("POST", f"{_JOB}/materializations"): (Right.RUN,),
    ("POST", f"{_JOB}/checkpoints/{{checkpoint_id}}/begin"): (Right.RUN,),
    ("POST", f"{_JOB}/checkpoints/{{checkpoint_id}}/flush"): (Right.RUN,),
    ("POST", f"{_JOB}/checkpoints/{{checkpoint_id}}/complete"): (Right.RUN,),
    ("POST", f"{_JOB}/checkpoints/{{checkpoint_id}}/abort"): (Right.RUN, Right.OPERATE),
    ("PUT", f"{_JOB}/savepoints/{{savepoint}}"): (Right.OPERATE,),
    ("DELETE", f"{_JOB}/savepoints/{{savepoint}}"): (Right.OPERATE,),
    ("PUT", f"{_JOB}/operators/{{operator}}/parallelism"): (Right.OPERATE,),
    ("POST", f"{_JOB}/garbage-collection"): (Right.OPERATE,),
    ("POST", f"{_JOB}/forks/{{fork}}"): (Right.RUN,),
}

PUBLIC_PATHS = frozenset(path for (_, path), rights in ROUTES.items() if Right.NONE in rights)
"""Paths without access control: only whether the process is alive."""

_PATTERNS = [
    (method, re.compile(re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", path)), rights)
    for (method, path), rights in ROUTES.items()
]


@dataclass(frozen=True, slots=True)
class Identity:
    """
    A caller and its rights.

    Args:
        name: Name for logs and the audit log; never a secret.
        role: Its role, see the module.
        jobs: Names of jobs, or prefixes followed by ``*``.
    """

    name: str
    role: RoleName = "full"
    jobs: tuple[str, ...] = ("*",)

    def __post_init__(self) -> None:
        if self.role != "full" and self.role not in _ROLES:
            raise InvalidInputError(f"role {self.role!r} is unknown; the roles are full, {', '.join(_ROLES)}")
        for job in self.jobs:
            if not isinstance(job, str) or not _JOBS.fullmatch(job):
                raise InvalidInputError(f"{job!r} is neither a job's name nor a prefix followed by *")

    @property
    def is_unlimited(self) -> bool:
        """Say whether this identity has all rights on all jobs."""
        return self.role == "full" and "*" in self.jobs

    def may(self, method: str, path: str) -> bool:
        """Say whether this identity may send a request."""
        if self.is_unlimited:
            return True
        rights, job, fork = _taken_by(method, path)
        if Right.KNOWN in rights or Right.NONE in rights:
            return True
        has_right = self.role == "full" or any(right in _ROLES[self.role] for right in rights)
        # A caller that runs the fork reads the state of the job, so it needs the right on both.
        return has_right and Right.FULL not in rights and self.covers(job) and (fork is None or self.covers(fork))

    def covers(self, job: str | None) -> bool:
        """Say whether this identity's jobs include a job, or, for None, all jobs."""
        return any(
            pattern in ("*", job) or (job is not None and pattern[-1] == "*" and job.startswith(pattern[:-1]))
            for pattern in self.jobs
        )


@lru_cache(1024)
def _taken_by(method: str, path: str) -> tuple[tuple[Right, ...], str | None, str | None]:
    """Return the rights of which a request requires one, its job, None if it concerns all jobs, and a fork of it."""
    for known, pattern, rights in _PATTERNS:
        found = pattern.fullmatch(path) if known == method else None
        if found is not None:
            return rights, found.groupdict().get("job"), found.groupdict().get("fork")
    return (Right.FULL,), None, None
