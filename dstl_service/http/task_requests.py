"""
The two requests that every task of every batch sends, append and restore, as values.

Here their query strings are parsed. FastAPI's routes declare the same parameters for the OpenAPI document only. No I/O.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import parse_qsl

from dstl_service.wire import CheckpointRef
from storage.errors import InvalidInputError
from storage.key_groups import KeyGroupRange
from storage.model import ChangeSetId, Writer
from storage.validation import COUNT_MAX, KEY_GROUP_MAX, NUMBER_MAX, check_int, shorten, validate_name

_DIGITS = re.compile(r"[0-9]{1,16}")
_CHECKSUM = re.compile(r"[0-9a-f]{16}")
_PARAMETERS_MAX = 32
_TRUTHS = {"true": True, "false": False}


@dataclass(frozen=True, slots=True)
class AppendRequest:
    """
    A request to take in one change set, without its body.

    Args:
        set_id: The set's identity.
        key_groups: Key groups of its changes.
        count: Number of its changes, 0 to 2^31 - 1.
        checksum: XXH3-64 of the body.
        is_preemptive: It is uploaded without waiting for its checkpoint.
        job_uid: The job that is meant; empty for the current one of its name.
    """

    set_id: ChangeSetId
    key_groups: KeyGroupRange
    count: int
    checksum: int
    is_preemptive: bool
    job_uid: str

    @classmethod
    def parse(cls, job: str, query: bytes) -> AppendRequest:
        """Parse a query string; `InvalidInputError` if a parameter is missing, repeated, or in another form."""
        values = _Parameters(query)
        set_id = ChangeSetId(
            job,
            values["operator"],
            values.number("checkpoint_id", NUMBER_MAX),
            Writer(values.number("epoch", NUMBER_MAX), values.number("attempt", NUMBER_MAX)),
            values.number("partition", KEY_GROUP_MAX),
            values.number("sqn", NUMBER_MAX),
        )
        count = values.number("count", COUNT_MAX)
        checksum = values["checksum"]
        if not _CHECKSUM.fullmatch(checksum):
            raise InvalidInputError("query.checksum: 16 lower-case hex digits are expected")
        is_preemptive = values.truth("preemptive")
        job_uid = values.get("job_uid", "")
        if job_uid:
            validate_name("job_uid", job_uid)
        return cls(set_id, values.key_groups, count, int(checksum, 16), is_preemptive, job_uid)


@dataclass(frozen=True, slots=True)
class RestoreRequest:
    """
    A request for what leads a table to a checkpoint.

    Args:
        job: Name of the job.
        operator: Its operator.
        key_groups: Its key groups.
        from_checkpoint: Its version; None for an empty table.
        to_checkpoint: The checkpoint that is asked for.
        is_output: Whether the changes are for no table, but rows in the log: a sink's output, or rows set aside.
        only: Of rows in the log, the checkpoint whose rows are asked for; None for all.
        is_copy: Whether the table is a standby's copy, which no task uses now.
        takes_files: Whether files on this host's disk may be named in place of their bytes.
    """

    job: str
    operator: str
    key_groups: KeyGroupRange
    from_checkpoint: CheckpointRef | None
    to_checkpoint: CheckpointRef
    is_output: bool = False
    only: int | None = None
    is_copy: bool = False
    takes_files: bool = False

    @classmethod
    def parse(cls, job: str, query: bytes) -> RestoreRequest:
        """Parse a query string; `InvalidInputError` if a parameter is missing, repeated, or in another form."""
        values = _Parameters(query)
        have = values.get("have", None)
        return cls(
            validate_name("job", job),
            validate_name("operator", values["operator"]),
            values.key_groups,
            None if have is None else CheckpointRef.parse(have),
            CheckpointRef.parse(values["to"]),
            values.truth("output"),
            values.number("only", NUMBER_MAX) if "only" in values else None,
            values.truth("copy"),
            values.truth("files"),
        )

    @property
    def is_for_task(self) -> bool:
        """Whether a task needs the changes for its table now."""
        return not (self.is_output or self.is_copy)


class _Parameters(dict[str, str]):
    """The parameters of a query string, each given once."""

    def __init__(self, query: bytes) -> None:
        if query.count(b"&") >= _PARAMETERS_MAX:
            raise InvalidInputError(f"the query has more than {_PARAMETERS_MAX} parameters")
        pairs = _pairs(query.decode("latin-1"))
        super().__init__(pairs)
        if len(self) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise InvalidInputError(f"query.{shorten(twice)}: the parameter is given more than once")

    def __missing__(self, name: str) -> str:
        raise InvalidInputError(f"query.{name}: the parameter is missing")

    @property
    def key_groups(self) -> KeyGroupRange:
        return KeyGroupRange(
            self.number("first_key_group", KEY_GROUP_MAX), self.number("last_key_group", KEY_GROUP_MAX)
        )

    def truth(self, name: str) -> bool:
        found = _TRUTHS.get(self.get(name, "false"))
        if found is None:
            raise InvalidInputError(f"query.{name}: true or false is expected")
        return found

    def number(self, name: str, value_max: int) -> int:
        text = self[name]
        if not _DIGITS.fullmatch(text):
            raise InvalidInputError(f"query.{name}: a number of 1 to 16 digits is expected")
        value = int(text)
        if value > value_max:
            check_int(f"query.{name}", value, value_max)
        return value


def _pairs(query: str) -> list[tuple[str, str]]:
    """Return names and values; a query without escapes, as the client's are, needs no general parser."""
    if "%" in query or "+" in query:
        return parse_qsl(query, keep_blank_values=True)
    return [(name, value) for name, _, value in (pair.partition("=") for pair in query.split("&") if pair)]
