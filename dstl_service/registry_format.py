"""
What ``job.json`` and the records of epochs hold, and the keys of epochs and manifests. No I/O.

Manifests have a module of their own, `dstl_service.manifest`.
"""

from __future__ import annotations

import json

from storage.errors import CorruptDataError

JOB_FORMAT = 1


def encode_job(uid: str, max_parallelism: int) -> bytes:
    """Return ``job.json``."""
    return json.dumps({"format": JOB_FORMAT, "uid": uid, "max_parallelism": max_parallelism}).encode()


def decode_job(data: bytes, key: str) -> tuple[str, int]:
    """
    Read ``job.json``: the job's uid and max_parallelism.

    Raises:
        CorruptDataError: It cannot be read.
    """
    try:
        document = json.loads(data)
        if int(document["format"]) > JOB_FORMAT:
            raise ValueError(f"its format {document['format']} is newer than {JOB_FORMAT}")
        if not isinstance(document["uid"], str) or not isinstance(document["max_parallelism"], int):
            raise TypeError("uid or max_parallelism is missing")
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptDataError(f"{key} cannot be read: {error}", object_key=key) from error
    return document["uid"], document["max_parallelism"]


def encode_epoch(epoch: int, owner: str, uid: str, began_ms: int, latest_id: int) -> bytes:
    """Return an epoch's record; `latest_id` is a checkpoint from which the manifests need only be listed."""
    record = {"epoch": epoch, "owner": owner, "uid": uid, "began_ms": began_ms, "latest_id": latest_id}
    return json.dumps(record).encode()


def decode_epoch(data: bytes, key: str) -> int:
    """
    Read an epoch's record: its `latest_id`.

    Raises:
        CorruptDataError: It cannot be read.
    """
    try:
        return int(json.loads(data)["latest_id"])
    except (ValueError, LookupError, TypeError) as error:
        raise CorruptDataError(f"{key} cannot be read: {error}", object_key=key) from error


def epoch_key(job: str, epoch: int) -> str:
    """Return the key of an epoch's record."""
    return f"{job}/epochs/{epoch:020d}.json"


def manifest_prefix(job: str, checkpoint_id: int) -> str:
    """Return what the keys of all generations of a checkpoint's manifest begin with."""
    return f"{job}/checkpoints/{checkpoint_id:020d}."


def manifest_key(job: str, checkpoint_id: int, generation: int) -> str:
    """Return the key of a manifest; keys are in the order of checkpoint ids, then generations."""
    return f"{manifest_prefix(job, checkpoint_id)}{generation:06d}.json"


def number_of(key: str) -> int:
    """
    Return the epoch that an epoch record's key names.

    Raises:
        CorruptDataError: It names none.
    """
    try:
        return int(key.rsplit("/", 1)[1].split(".", maxsplit=1)[0])
    except ValueError:
        raise _foreign(key) from None


def place_of(key: str) -> tuple[int, int]:
    """
    Return the checkpoint id and generation that a manifest's key names.

    Raises:
        CorruptDataError: It names none.
    """
    try:
        checkpoint_id, generation, _ = key.rsplit("/", 1)[1].split(".")
        return int(checkpoint_id), int(generation)
    except ValueError:
        raise _foreign(key) from None


def _foreign(key: str) -> CorruptDataError:
    return CorruptDataError(
        f"{key} has a name that no such object can have: nothing of this project wrote it, so move it elsewhere",
        object_key=key,
    )
