"""
Formats of ``job.json`` and epoch records, and the keys of epochs and manifests. No I/O.

Keys begin with the folder of a job's life, see `dstl_service.registry.lives.life_folder`.

Manifests have a module of their own, `dstl_service.formats.manifest`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from dstl_service.formats.checksummed_json import reading, stamp, unstamp
from dstl_service.formats.fork_origin import origin_from_json, origin_to_json
from dstl_service.wire import BRANCH_GENERATIONS, ForkOrigin
from storage.errors import CorruptDataError, NewerFormatError, UnavailableError
from storage.key_groups import KeyGroupRange
from storage.stored_json import text_of, whole_number

JOB_FORMAT, FORKED_JOB_FORMAT, REWRITTEN_JOB_FORMAT = 1, 2, 3
"""
A version that knows no forks must not open one: it would begin with an empty state. One that rewrites no tables must
not open a fork with other key groups than its parent's: it would not find its keys.
"""


class Place(NamedTuple):
    """
    The position of a manifest or fence; places sort in the order in which they were written.

    A *branch* is a sequence of manifests to which each owner appends after the last one, so that two owners conflict. A
    rewind begins a new branch, named by its epoch; the first branch is 0. A branch is ordered by checkpoint id; an id
    has the fences of the epochs that took the job over there, then at most one checkpoint.

    Args:
        branch: Epoch of the rewind that began the branch; 0 for a job's first.
        id: The checkpoint's id.
        number: Counts fences and manifest at this id, from 0.
    """

    branch: int
    id: int
    number: int

    @property
    def generation(self) -> int:
        """Branch and number in one integer, as in references to checkpoints."""
        return self.branch * BRANCH_GENERATIONS + self.number

    @classmethod
    def of(cls, checkpoint_id: int, generation: int) -> Place:
        """Return the place of a manifest of this id and generation."""
        branch, number = divmod(generation, BRANCH_GENERATIONS)
        return cls(branch, checkpoint_id, number)

    def next(self, *, is_fence: bool) -> Place:
        """
        Return the place to write after this one: the same id after a fence, the next id after a checkpoint.

        Raises:
            UnavailableError: The job was taken over a million times at this checkpoint.
        """
        if not is_fence:
            return Place(self.branch, self.id + 1, 0)
        if self.number + 1 == BRANCH_GENERATIONS:
            raise UnavailableError(
                f"the job was taken over {BRANCH_GENERATIONS} times at checkpoint {self.id} without completing it: "
                "make a savepoint, then rewind the job to it"
            )
        return self._replace(number=self.number + 1)


@dataclass(frozen=True, slots=True)
class Rewind:
    """
    The rewind that an epoch begins with.

    Args:
        savepoint: Name of the savepoint that holds the target until the rewind is done.
        target: Id of the target checkpoint.
        parent: The branch that ends.
    """

    savepoint: str
    target: int
    parent: int


@dataclass(frozen=True, slots=True)
class EpochRecord:
    """
    One takeover of a job, and the job's position at that time. Decided by create-if-absent, never altered.

    Args:
        epoch: Its number.
        owner: Name of the new owner, for people.
        uid: Makes the record's bytes unique.
        began_ms: Time of the takeover, for people.
        branch: The branch to which manifests are written from now on.
        latest: Place of the newest checkpoint seen, or None: later manifests are searched from there on. For a rewind
            it is in the branch that ends.
        tail: The last place seen in that branch, maybe a fence's.
        rewind: The rewind that the epoch begins with, or None.
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
        return stamp(record)

    @classmethod
    def decode(cls, data: bytes, key: str) -> EpochRecord:
        """
        Read a record.

        Raises:
            CorruptDataError: The record cannot be read.
        """
        with reading(key, object_key=key):
            record = unstamp(data)
            int(record["latest_id"])
            return cls(
                epoch=int(record["epoch"]),
                owner=text_of(record["owner"]),
                uid=text_of(record["uid"]),
                began_ms=whole_number(record["began_ms"]),
                branch=int(record.get("branch", 0)),
                latest=_place_or_none(record.get("latest")),
                tail=_place_or_none(record.get("tail")),
                rewind=_rewind_or_none(record.get("rewind")),
            )


def _place_or_none(numbers: Any) -> Place | None:
    if numbers is None:
        return None
    branch, checkpoint_id, number = (int(part) for part in numbers)
    return Place(branch, checkpoint_id, number)


def _rewind_or_none(record: Any) -> Rewind | None:
    if record is None:
        return None
    return Rewind(str(record["savepoint"]), int(record["target"]), int(record["parent"]))


class JobRecord(NamedTuple):
    """
    The content of ``job.json``: what is fixed when a job is created.

    Args:
        uid: Distinguishes lives of one job name.
        max_parallelism: Number of the job's key groups.
        origin: Where a forked job begins; None for any other.
    """

    uid: str
    max_parallelism: int
    origin: ForkOrigin | None = None


def encode_job(uid: str, max_parallelism: int, origin: ForkOrigin | None = None) -> bytes:
    """Return ``job.json``."""
    if origin is None:
        return stamp({"format": JOB_FORMAT, "uid": uid, "max_parallelism": max_parallelism})
    number = FORKED_JOB_FORMAT if origin.max_parallelism is None else REWRITTEN_JOB_FORMAT
    document = {"format": number, "uid": uid, "max_parallelism": max_parallelism}
    return stamp({**document, "origin": origin_to_json(origin)})


def decode_job(data: bytes, key: str) -> JobRecord:
    """
    Read ``job.json``.

    Raises:
        NewerFormatError: A newer version wrote it; says what to do.
        CorruptDataError: ``job.json`` cannot be read.
    """
    with reading(key, object_key=key):
        document = unstamp(data)
        NewerFormatError.check(key, int(document["format"]), REWRITTEN_JOB_FORMAT, object_key=key)
        groups = KeyGroupRange(0, whole_number(document["max_parallelism"]) - 1)
        return JobRecord(text_of(document["uid"]), len(groups), origin_from_json(document.get("origin")))


def epoch_prefix(folder: str) -> str:
    """Return the key prefix of all epoch records."""
    return f"{folder}/epochs/"


def epoch_key(folder: str, epoch: int) -> str:
    """Return the key of an epoch's record."""
    return f"{epoch_prefix(folder)}{epoch:020d}.json"


def hint_key(folder: str, name: str) -> str:
    """Return the key of a hint; see `dstl_service.registry.hints`."""
    return f"{hints_prefix(folder)}{name}.json"


def hints_prefix(folder: str) -> str:
    """Return the key prefix of all hints."""
    return f"{folder}/hints/"


def manifests_prefix(folder: str) -> str:
    """Return the key prefix of all manifests."""
    return f"{folder}/checkpoints/"


def branch_prefix(folder: str, branch: int) -> str:
    """Return the key prefix of a branch's manifests; for branch 0 the prefix of all manifests."""
    return f"{manifests_prefix(folder)}{f'r{branch:012d}.' if branch else ''}"


def place_prefix(folder: str, branch: int, checkpoint_id: int) -> str:
    """Return the key prefix of all places of one checkpoint id in a branch."""
    return f"{branch_prefix(folder, branch)}{checkpoint_id:020d}."


def place_key(folder: str, place: Place) -> str:
    """Return the key of a place; keys sort like places."""
    return f"{place_prefix(folder, place.branch, place.id)}{place.number:06d}.json"


def manifest_key(folder: str, checkpoint_id: int, generation: int) -> str:
    """Return the key of a manifest."""
    return place_key(folder, Place.of(checkpoint_id, generation))


def number_of(key: str) -> int:
    """
    Return the epoch in an epoch record's key.

    Raises:
        CorruptDataError: The key names no epoch.
    """
    try:
        return int(key.rsplit("/", 1)[1].split(".", maxsplit=1)[0])
    except ValueError:
        raise _foreign(key) from None


def place_of(key: str) -> Place:
    """
    Return the place in a manifest's key.

    Raises:
        CorruptDataError: The key names no place.
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
        f"{key} is not a valid key here: this service never writes it, so move the object elsewhere",
        object_key=key,
    )
