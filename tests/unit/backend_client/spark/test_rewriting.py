"""Which entries get which key groups when state is rewritten, and under which names of tables."""

from __future__ import annotations

from dataclasses import replace

import pytest

from backend_client.columnar.state import INDEX, STATE
from backend_client.spark.start.fork_start import is_at_fork
from backend_client.spark.start.rewriting import check_rewriting, new_operators, rewritten_from
from backend_client.spark.start.table_rewriting import NewKeys
from backend_client.state.codec import KeyCodec
from backend_client.state.expiry import EXPIRY
from backend_client.state.key_hash import KeyHash, key_group_of
from backend_client.state.keyed_state import table_key
from backend_client.state.timers import BY_KEY, BY_TIME
from dstl_service.wire import (
    REMOVED,
    SET_ASIDE,
    CheckpointInfo,
    CheckpointRef,
    ForkOrigin,
    OperatorInfo,
    StateInfo,
)
from storage.errors import CorruptDataError, InvalidInputError
from tests.unit.backend_client.schemas import schema

KEY = schema(k="string", n="integer")
STATES = {"value": StateInfo(1, "value", "{}"), "gone": StateInfo(3, "deleted", "{}")}
COLUMNS = {"columns": StateInfo(1, STATE, "{}"), "ends": StateInfo(2, INDEX, "{}")}
MOMENT = bytes(range(8))
BEFORE, AFTER = 8, 24


def key(number: int) -> bytes:
    return KeyCodec(KEY).encode(("k", number))


def groups(number: int) -> tuple[int, int]:
    """Return a key's key group before and after."""
    _, hashed = KeyHash(KEY).first(key(number))
    return key_group_of(hashed, BEFORE), key_group_of(hashed, AFTER)


@pytest.mark.parametrize(
    ("states", "state_id", "before_key", "after_key"),
    [
        (STATES, 1, b"", b""),
        (STATES, 1, b"", b"entry of a list or map"),
        (STATES, 3, b"", b""),
        (STATES, BY_KEY, b"", MOMENT),
        (STATES, BY_TIME, MOMENT, b""),
        (STATES, EXPIRY, MOMENT + b"\0\1", b"entry"),
        (COLUMNS, 1, b"", b"\xd3" + MOMENT),
        (COLUMNS, 2, MOMENT, b"\xd3" + MOMENT),
    ],
)
def test_each_kind_of_entry_moves_with_its_key(
    states: dict[str, StateInfo], state_id: int, before_key: bytes, after_key: bytes
) -> None:
    """I14: nothing but the key group changes, whatever stands before and after the key."""
    new_keys = NewKeys(KEY, states, BEFORE, AFTER)
    for number in (1, 1, 2, 3, 20, 1):
        old, new = groups(number)
        rest = before_key + key(number) + after_key
        assert new_keys(table_key(old, state_id, rest)) == (new, table_key(new, state_id, rest))


def test_wrong_entries_are_refused() -> None:
    """I14: an entry whose key group Spark had computed otherwise, or of which nothing is known, is never moved."""
    new_keys = NewKeys(KEY, STATES, BEFORE, AFTER)
    old, _ = groups(1)
    new_keys(table_key(old, 1, key(1)))
    with pytest.raises(CorruptDataError, match=f"its key's is {old}"):
        new_keys(table_key((old + 1) % BEFORE, 1, key(1)))
    with pytest.raises(CorruptDataError, match="unknown state variable"):
        new_keys(table_key(old, 2, key(1)))
    for damaged in (b"", b"\xc1", b"\x91\x01", b"\x92\xa1"):
        with pytest.raises(CorruptDataError, match="cannot be read"):
            new_keys(table_key(old, 1, damaged))


def test_new_tables_have_names_that_were_never_used() -> None:
    """Operators keep their names, and the number of partitions if there are as many key groups."""
    stored = [
        OperatorInfo("a", 4, KEY, STATES),
        OperatorInfo("b.2", 30, KEY, STATES, called="b", renamed_from="z"),
        OperatorInfo("b", 4, "", {}, kind=REMOVED),
        OperatorInfo("old", 4, KEY, STATES, called="new"),
        OperatorInfo("a.set-aside", 4, "", {}, kind=SET_ASIDE),
    ]
    made = new_operators(stored, AFTER)

    assert [(info.name, info.label, info.parallelism) for info in made] == [
        ("a.2", "a", 4),
        ("b.3", "b", 24),
        ("new", "new", 4),
    ]
    assert made[1].renamed_from == "z"


def fork(
    max_parallelism: int | None, checkpoint_id: int, base: CheckpointRef | None, key_schema: str = KEY
) -> CheckpointInfo:
    """Return a checkpoint of a fork that began at checkpoint 5."""
    origin = ForkOrigin("job", 0, CheckpointRef(5, 0, "theirs"), "fork-at-5", max_parallelism)
    operators = [OperatorInfo("a", 4, key_schema, STATES)]
    ref = CheckpointRef(checkpoint_id, 0, "x")
    return CheckpointInfo(ref, base, 1, 0, "q", "", operators, 0, 0, None, None, origin)


def test_first_checkpoint_is_rewritten_once() -> None:
    """A fork with other key groups has had no batch in its first two checkpoints, of which the first is rewritten."""
    first = fork(8, 5, None)
    second, third = fork(8, 6, first.ref), fork(8, 7, CheckpointRef(6, 0, "x"))
    assert [rewritten_from(one) for one in (None, first, second, third)] == [None, 8, None, None]
    assert [is_at_fork(one) for one in (first, second, third)] == [True, True, False]
    plain = fork(None, 5, None)
    assert (rewritten_from(plain), is_at_fork(plain)) == (None, True)
    assert not is_at_fork(replace(second, forked_from=plain.forked_from))
    rebuilt = replace(third, base=None)
    assert (rewritten_from(rebuilt), is_at_fork(rebuilt)) == (None, False)


def test_keys_that_cannot_be_rewritten_refuse_the_start() -> None:
    """A start that could not rewrite a key is refused before it takes the job over; others do not look."""
    collated = schema(k="string collate UTF8_LCASE")
    with pytest.raises(InvalidInputError, match="key column k is of type string collate"):
        check_rewriting(fork(8, 5, None, collated))
    for other in (None, fork(8, 6, CheckpointRef(5, 0, "x"), collated), fork(None, 5, None, collated)):
        check_rewriting(other)
