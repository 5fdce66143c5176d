"""Errors for jobs and epochs that the store does not have. Pure."""

from __future__ import annotations

from storage.errors import NotFoundError


def no_such_epoch(name: str, epoch: int) -> NotFoundError:
    """Return the error for an epoch that the store does not have."""
    return NotFoundError(
        f"job {name!r} has no epoch {epoch}: the job was deleted or never opened; open the job first "
        f"(POST /v1/jobs/{name}/epochs), and send the epoch from the answer",
        job=name,
    )


def no_such_job(name: str, job_uid: str) -> NotFoundError:
    """Return the error for a name that no longer belongs to the job that is meant."""
    return NotFoundError(
        f"no job {name!r} with uid {job_uid[:64]} exists: it was deleted, and another job may have its name; restart "
        "the query",
        job=name,
    )
