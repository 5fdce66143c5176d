"""
What ``job.json`` and the records of epochs hold, and the keys of epochs and manifests. No I/O.

Keys begin with the folder of a job's life, see `dstl_service.registry.lives.life_folder`.

Manifests have a module of their own, `dstl_service.formats.manifest`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, NamedTuple

from storage.errors import CorruptDataError, UnavailableError

JOB_FORMAT = 1
_NUMBERS = 10**6


class Place(NamedTuple):
    """
    Where a manifest lies; places are in the order in which they were written.

    A *branch* is a sequence of manifests to which each owner appends behind the last one, so that two owners collide.
    A rewind begins a new branch, named by its epoch; the first one is 0. Within a branch come checkpoint ids, and
    for one id the fences of those who took the job over there, and behind them at most one manifest.

    Args:
        branch: Epoch of the rewind that began the branch; 0 for a job's first.
        id: The checkpoint's id.
        number: Counts what lies at this id.
    """

    branch: int
    id: int
    number: int

    @property
    def generation(self) -> int:
        """Branch and number in one, as references to checkpoints have them."""
        return self.branch * _NUMBERS + self.number

    @classmethod
    def of(cls, checkpoint_id: int, generation: int) -> Place:
        """Return the place of a manifest of this id and generation."""
        branch, number = divmod(generation, _NUMBERS)
        return cls(branch, checkpoint_id, number)

    def behind(self, *, is_fence: bool) -> Place:
        """
        Return the place to write to behind this one: the same id behind a fence, the next behind a checkpoint.

        Raises:
            UnavailableError: The job was taken over a million times at this checkpoint.
        """
        if not is_fence:
            return Place(self.branch, self.id + 1, 0)
        if self.number + 1 == _NUMBERS:
            raise UnavailableError(
                f"the job was taken over {_NUMBERS} times at checkpoint {self.id} and completed none: make a savepoint "
                "and set the job back to it"
            )
        return self._replace(number=self.number + 1)


@dataclass(frozen=True, slots=True)
class Rewind:
    """
    What an epoch does that sets the job back.

    Args:
        savepoint: Holds what the job is set back to, until that is done.
        target: Id of the checkpoint that it is of.
        parent: The branch that ends.
    """

    savepoint: str
    target: int
    parent: int


@dataclass(frozen=True, slots=True)
class EpochRecord:
    """
    Who took a job over, and where it stood. Decided by create-if-absent, and never altered.

    Args:
        epoch: Its number.
        owner: Who took the job over, for people.
        uid: Makes the record's bytes its own.
        began_ms: When, for people.
        branch: Where manifests are written from now on.
        latest: The newest checkpoint's place that was seen, or None: from there on manifests need only be looked for.
            For a rewind that is in the branch that ends.
        tail: The last place that was seen there, which may be a fence's.
        rewind: What the epoch sets the job back to, if it does.
    """

    epoch: int
    owner: str
    uid: str
    began_ms: int
    branch: int = 0
    latest: Place | None = None
    tail: Place | None = None
    rewind: Rewind | None = None

    def encode(self) -> bytes:
        """Return the object's bytes."""
        record: dict[str, Any] = {
            "epoch": self.epoch,
            "owner": self.owner,
            "uid": self.uid,
            "began_ms": self.began_ms,
            "latest_id": self.latest.id if self.latest else 0,
            "branch": self.branch,
            "latest": self.latest,
            "tail": self.tail,
        }
        if self.rewind is not None:
            rewind = self.rewind
            record["rewind"] = {"savepoint": rewind.savepoint, "target": rewind.target, "parent": rewind.parent}
        return json.dumps(record).encode()

    @classmethod
    def decode(cls, data: bytes, key: str) -> EpochRecord:
        """
        Read a record.

        Raises:
            CorruptDataError: It cannot be read.
        """
        try:
            record = json.loads(data)
            int(record["latest_id"])
            return cls(
                epoch=int(record["epoch"]),
                owner=record["owner"],
                uid=record["uid"],
                began_ms=record["began_ms"],
                branch=int(record.get("branch", 0)),
                latest=_place_or_none(record.get("latest")),
                tail=_place_or_none(record.get("tail")),
                rewind=_rewind_or_none(record.get("rewind")),
            )
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise CorruptDataError(f"{key} cannot be read: {error}", object_key=key) from error


def _place_or_none(numbers: Any) -> Place | None:
    if numbers is None:
        return None
    branch, checkpoint_id, number = (int(part) for part in numbers)
    return Place(branch, checkpoint_id, number)


def _rewind_or_none(record: Any) -> Rewind | None:
    if record is None:
        return None
    return Rewind(str(record["savepoint"]), int(record["target"]), int(record["parent"]))


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


def epoch_prefix(folder: str) -> str:
    """Return what the keys of all epochs' records begin with."""
    return f"{folder}/epochs/"


def epoch_key(folder: str, epoch: int) -> str:
    """Return the key of an epoch's record."""
    return f"{epoch_prefix(folder)}{epoch:020d}.json"


def hint_key(folder: str, name: str) -> str:
    """Return the key of a number that only saves requests, see `dstl_service.registry.hints`."""
    return f"{hints_prefix(folder)}{name}.json"


def hints_prefix(folder: str) -> str:
    """Return what the keys of all such numbers begin with."""
    return f"{folder}/hints/"


def manifests_prefix(folder: str) -> str:
    """Return what the keys of all manifests begin with."""
    return f"{folder}/checkpoints/"


def branch_prefix(folder: str, branch: int) -> str:
    """Return what the keys of a branch's manifests begin with; of branch 0, where all manifests' keys begin."""
    return f"{manifests_prefix(folder)}{f'r{branch:012d}.' if branch else ''}"


def place_prefix(folder: str, branch: int, checkpoint_id: int) -> str:
    """Return what the keys of all places of one checkpoint id in a branch begin with."""
    return f"{branch_prefix(folder, branch)}{checkpoint_id:020d}."


def place_key(folder: str, place: Place) -> str:
    """Return the key of what lies at a place; keys are in the order of places."""
    return f"{place_prefix(folder, place.branch, place.id)}{place.number:06d}.json"


def manifest_key(folder: str, checkpoint_id: int, generation: int) -> str:
    """Return the key of a manifest."""
    return place_key(folder, Place.of(checkpoint_id, generation))


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


def place_of(key: str) -> Place:
    """
    Return the place that a manifest's key names.

    Raises:
        CorruptDataError: It names none.
    """
    try:
        *branch, checkpoint_id, number, _ = key.rsplit("/", 1)[1].split(".")
        return Place(_branch_of(branch), int(checkpoint_id), int(number))
    except ValueError:
        raise _foreign(key) from None


def _branch_of(parts: list[str]) -> int:
    if not parts:
        return 0
    (name,) = parts
    if not name.startswith("r"):
        raise ValueError(name)
    return int(name[1:])


def _foreign(key: str) -> CorruptDataError:
    return CorruptDataError(
        f"{key} has a name that no such object can have: nothing of this project wrote it, so move it elsewhere",
        object_key=key,
    )
