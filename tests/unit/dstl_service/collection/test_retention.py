"""Which checkpoints are retained, and which objects are deleted with the others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dstl_service.collection.retention import RetentionSettings, RetentionTracker, manifests_to_keep
from dstl_service.formats.manifest import Manifest, ManifestKind
from storage.errors import CorruptDataError, InvalidInputError
from storage.key_groups import KeyGroupRange
from storage.model import ChangeSetId, SegmentEntry, SegmentHandle, Writer


def handle(checkpoint_id: int, key: str | None = None) -> SegmentHandle:
    set_id = ChangeSetId("job", "op", checkpoint_id, Writer(1, 1), 0, 0)
    entry = SegmentEntry(set_id, KeyGroupRange(0, 127), 1, 16, 10, 0)
    return SegmentHandle(key or f"o{checkpoint_id}", 100, entry)


def chain(*kinds: str, earlier: dict[int, tuple[str, ...]] | None = None) -> list[Manifest]:
    """Return manifests, oldest first: "c" complete, "d" delta; `earlier` names objects of complete ones."""
    made: list[Manifest] = []
    for number, kind in enumerate(kinds):
        base = made[-1] if made else None
        before = tuple(h for m in made for h in m.segments) if kind == "c" else ()
        if earlier and number in earlier:
            before = tuple(handle(0, key) for key in earlier[number])
        made.append(
            Manifest(
                kind=ManifestKind.COMPLETE if kind == "c" else ManifestKind.DELTA,
                job_uid="j",
                id=number,
                generation=0,
                uid=f"u{number}",
                epoch=1,
                created_ms=0,
                base=base.ref if base else None,
                segments=(handle(number),),
                earlier=before,
            )
        )
    return made


def book(manifests: list[Manifest], retained: int, delay_s: int = 0) -> RetentionTracker:
    """Return a book in which these checkpoints were completed at seconds 0, 1, 2, …."""
    made = RetentionTracker(RetentionSettings(retained, delay_s))
    made.begin([manifests[0]])
    for second, manifest in enumerate(manifests[1:], start=1):
        made.completed(manifest, second * 1000)
    return made


def test_log_that_grows_keeps_all_objects() -> None:
    """I11: old manifests are deleted, but their additions are still part of the retained checkpoints' state."""
    (deletion,) = book(chain("c", "d", "d", "c", "d", "d"), retained=2).take_due(10_000)

    assert [ref.id for ref in deletion.manifests] == [0, 1, 2]
    assert deletion.object_keys == frozenset()


def test_delta_keeps_its_chain() -> None:
    """I11: a retained delta manifest keeps all manifests back to the complete one."""
    assert book(chain("c", "d", "d", "d", "d"), retained=1).take_due(10_000) == []


def test_replaced_log_is_deleted() -> None:
    """Objects that a compaction replaced are deleted with the last manifest that names them."""
    manifests = chain("c", "d", "c", "d", earlier={2: ("base",)})
    (deletion,) = book(manifests, retained=2).take_due(10_000)

    assert [ref.id for ref in deletion.manifests] == [0, 1]
    assert deletion.object_keys == {"o0", "o1"}


def test_retained_checkpoint_keeps_replaced_log() -> None:
    """I11: a log that was compacted stays while an earlier checkpoint is retained."""
    assert book(chain("c", "d", "c", "d", earlier={2: ("base",)}), retained=3).take_due(10_000) == []


def test_deletion_waits() -> None:
    """A reader that began before a checkpoint was subsumed can finish within the delay."""
    made = book(chain("c", "c", "c", earlier={1: ("b1",), 2: ("b2",)}), retained=1, delay_s=60)

    assert made.take_due(60_999) == []
    assert [deletion.object_keys for deletion in made.take_due(61_000)] == [{"o0"}]
    assert made.waiting == 2
    assert [deletion.object_keys for deletion in made.take_due(99_000)] == [{"o1", "b1"}]
    assert (made.take_due(99_000), made.waiting) == ([], 0)


def test_shared_object_stays() -> None:
    """I11: an object that holds segments of several checkpoints stays while one of them is needed."""
    manifests = chain("c", "d", "c", earlier={2: ("o1", "base")})
    (deletion,) = book(manifests, retained=1).take_due(10_000)

    assert deletion.object_keys == {"o0"}


def test_book_begins_at_what_is_stored() -> None:
    """A new coordinator takes over its predecessor's manifests, back to those that the retained checkpoints need."""
    manifests = chain("c", "d", "c", "d", "d", "c", "d")
    made = RetentionTracker(RetentionSettings(3, 0))
    made.begin(reversed(manifests))

    assert made.newest == manifests[-1].ref
    made.completed(replace(manifests[-1], id=7, uid="u7", base=manifests[-1].ref), 0)
    (deletion,) = made.take_due(0)
    assert [ref.id for ref in deletion.manifests] == [2, 3, 4]


@pytest.mark.parametrize(
    ("kinds", "retained", "kept"),
    [("cdcd", 1, [3, 2]), ("cdcd", 2, [3, 2]), ("cdcd", 3, [3, 2, 1, 0]), ("cdcd", 9, [3, 2, 1, 0]), ("c", 1, [0])],
)
def test_needed_manifests(kinds: str, retained: int, kept: list[int]) -> None:
    """The retained checkpoints' manifests are kept, and those before them back to a complete one."""
    assert [m.id for m in manifests_to_keep(reversed(chain(*kinds)), retained)] == kept


def test_older_rest_of_a_chain_is_left_out() -> None:
    """Where older manifests are already deleted, checkpoints that are no longer whole are not kept."""
    assert [m.id for m in manifests_to_keep(reversed(chain(*"cddcd")[1:]), 9)] == [4, 3]


def test_broken_chain_is_reported() -> None:
    """If not even the newest checkpoint is whole, nothing may be deleted."""
    with pytest.raises(CorruptDataError, match="breaks off"):
        manifests_to_keep(reversed(chain(*"cdd")[1:]), 1)


@pytest.mark.parametrize("values", [{"checkpoints_max": 0}, {"delay_s": -1}])
def test_impossible_settings_are_refused(values: dict[str, int]) -> None:
    """A setting that would not retain the newest checkpoint is refused."""
    with pytest.raises(InvalidInputError, match="retention"):
        RetentionSettings(**values)
