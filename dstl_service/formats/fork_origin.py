"""
The JSON forms of a fork's origin, in ``job.json``, manifests and notes of the forked job, and of the purpose of a hold.

No I/O.
"""

from __future__ import annotations

import re
from typing import Any

from dstl_service.wire import NAME, CheckpointRef, ForkOrigin
from storage.key_groups import KeyGroupRange
from storage.stored_json import text_of, whole_number
from storage.validation import validate_name

_FORK = re.compile(rf"(?:{NAME}@[0-9]{{1,8}})?")


def origin_to_json(origin: ForkOrigin) -> dict[str, Any]:
    """Return the JSON form that `origin_from_json` reads."""
    return {
        "job": origin.job,
        "life": origin.life,
        "checkpoint": origin.checkpoint.to_text(),
        "savepoint": origin.savepoint,
        **({} if origin.max_parallelism is None else {"max_parallelism": origin.max_parallelism}),
    }


def origin_from_json(document: Any) -> ForkOrigin | None:
    """
    Read the result of `origin_to_json`; None for None, the value of every job that is not a fork.

    Raises:
        LookupError, TypeError, ValueError: It has another form.
    """
    if document is None:
        return None
    groups = document.get("max_parallelism")
    return ForkOrigin(
        job=validate_name("job", document["job"]),
        life=whole_number(document["life"]),
        checkpoint=CheckpointRef.parse(text_of(document["checkpoint"])),
        savepoint=validate_name("savepoint", document["savepoint"]),
        max_parallelism=None if groups is None else len(KeyGroupRange(0, whole_number(groups) - 1)),
    )


def held_for_from_json(value: Any) -> str:
    """Return the fork that a savepoint is for, as ``<job>@<life>``; empty for None. Raises as `origin_from_json`."""
    if _FORK.fullmatch(text := "" if value is None else text_of(value)) is None:
        raise TypeError(f"{text[:80]!r} is no fork")
    return text
