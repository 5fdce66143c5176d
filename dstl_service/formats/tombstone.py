"""The tombstone of a deleted job, the keys around it, and their JSON form; see `collection.tombstones`. No I/O."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

from dstl_service.formats.checksummed_json import stamp, unstamp
from dstl_service.process.display import utc_text
from storage.errors import CorruptDataError, InvalidInputError
from storage.stored_json import text_of, whole_number
from storage.validation import validate_name

TOMBSTONES = "@deleted/"
"""The key prefix of all tombstones."""


@dataclass(frozen=True, slots=True)
class Tombstone:
    """
    Records a job's deletion: the life of its name, by whom and when, and until when it can be undone.

    `number` counts the deletions of this life that were undone before.
    """

    job: str
    uid: str
    who: str
    at_ms: int
    until_ms: int
    life: int = 0
    number: int = 0

    @property
    def text(self) -> str:
        """The record as text for people."""
        at, until = utc_text(self.at_ms, "seconds"), utc_text(self.until_ms, "seconds")
        return f"was deleted by {self.who} at {at}, which can be undone until {until}"

    @property
    def key(self) -> str:
        """Its own key."""
        return tombstone_key(self.job, self.life, self.number)

    @property
    def past_key(self) -> str:
        """The key that says that it was undone."""
        return past_key(self.job, self.life, self.number)

    @property
    def fate_key(self) -> str:
        """The key that decides what becomes of it."""
        return f"@fates/{self.job}/{self.uid}"

    def encode(self) -> bytes:
        """Return the object's bytes."""
        return stamp(asdict(self))

    @classmethod
    def decode(cls, data: bytes, key: str) -> Tombstone:
        """
        Read a tombstone.

        Raises:
            CorruptDataError: It cannot be read.
        """
        try:
            document = unstamp(data)
            made = cls(
                job=validate_name("job", document["job"]),
                uid=validate_name("tombstone", document["uid"]),
                who=text_of(document["who"]),
                at_ms=whole_number(document["at_ms"]),
                until_ms=whole_number(document["until_ms"]),
                life=whole_number(document.get("life", 0)),
                number=whole_number(document.get("number", 0)),
            )
            if made.key != key:  # else another job would be deleted
                raise ValueError(f"it is that of {made.key}")
        except (ValueError, LookupError, TypeError, InvalidInputError) as error:
            raise CorruptDataError(
                f"tombstone {key} cannot be read: remove it, and delete its job again before a query of it starts",
                object_key=key,
            ) from error
        return made


def tombstone_key(job: str, life: int, number: int) -> str:
    """Return the key of the tombstone of a life that follows `number` undone ones."""
    which = f"@{life}.{number}" if number else f"@{life}" if life else ""
    return f"{TOMBSTONES}{job}{which}.json"


def past_key(job: str, life: int, number: int) -> str:
    """Return the key that says that the tombstone of this number was undone."""
    return f"@fates/{job}/{life:08d}.{number:06d}"


def first_without(is_past: Callable[[int], bool]) -> int:
    """Return the first number that is not past, where numbers pass in order; O(log n) calls of `is_past`."""
    step = 1
    while is_past(step - 1):
        step *= 2
    past, found = step // 2 - 1, step - 1
    while found - past > 1:
        middle = (past + found) // 2
        past, found = (middle, found) if is_past(middle) else (past, middle)
    return found
