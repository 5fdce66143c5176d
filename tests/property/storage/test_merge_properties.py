"""Merging change sets has the same result as applying them in order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from storage.change_set import decode_change_set, encode_change_set, merge_change_sets
from storage.key_groups import KeyGroupRange

GROUPS = KeyGroupRange(0, 7)
keys = st.builds(lambda group, rest: bytes([0, group]) + rest, st.integers(0, 7), st.binary(max_size=2))
change_sets = st.lists(st.dictionaries(keys, st.none() | st.binary(max_size=9), min_size=1), max_size=6)
ranges = st.tuples(st.integers(0, 7), st.integers(0, 7)).map(lambda ends: KeyGroupRange(min(ends), max(ends)))

Changes = dict[bytes, bytes | None]


def applied(sets: list[tuple[Changes, list[KeyGroupRange]]]) -> Changes:
    """Return the last change per key, of the key groups that count in each set."""
    last: Changes = {}
    for changes, counting in sets:
        last.update({k: v for k, v in changes.items() if any(r.contains(k[1]) for r in counting)})
    return last


def merged(sets: list[tuple[Changes, list[KeyGroupRange]]], *, keep_deleted: bool, size_bytes_max: int) -> Changes:
    """Merge, and check that the results are disjoint, sorted and counted."""
    encoded = [(encode_change_set(changes), f"set {n}", counting) for n, (changes, counting) in enumerate(sets)]
    pieces = merge_change_sets(
        encoded, keep_deleted=keep_deleted, size_bytes_max=size_bytes_max, decoded_bytes_max=1 << 30
    )
    rows = []
    for payload, count in pieces:
        piece = list(decode_change_set(payload, "piece"))
        assert len(piece) == count > 0
        rows += piece
    assert [key for key, _ in rows] == sorted({key for key, _ in rows})
    return dict(rows)


@given(change_sets, st.integers(1, 60))
def test_merged_log_is_last_change_per_key(sets: list[Changes], size_bytes_max: int) -> None:
    """I14: applying the merged sets gives the same as applying all sets in order, including deletions."""
    whole = [(changes, [GROUPS]) for changes in sets]

    assert merged(whole, keep_deleted=True, size_bytes_max=size_bytes_max) == applied(whole)


@given(change_sets)
def test_base_has_no_deletions(sets: list[Changes]) -> None:
    """A base holds the existing keys, and nothing of deleted ones."""
    whole = [(changes, [GROUPS]) for changes in sets]

    assert merged(whole, keep_deleted=False, size_bytes_max=1 << 20) == {
        key: value for key, value in applied(whole).items() if value is not None
    }


@given(
    change_sets.flatmap(lambda sets: st.tuples(*(st.tuples(st.just(s), st.lists(ranges, max_size=1)) for s in sets)))
)
def test_only_counting_key_groups_are_merged(sets: tuple[tuple[Changes, list[KeyGroupRange]], ...]) -> None:
    """I14: from a set that is partly older than a materialization, only the other key groups are merged."""
    assert merged(list(sets), keep_deleted=True, size_bytes_max=100) == applied(list(sets))
