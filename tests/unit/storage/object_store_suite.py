"""
Requirements of every object store, as classes of tests that a module inherits with its own `store` fixture.

A failure means that checkpoints on this store can be lost, altered or misread.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from storage.errors import ConflictError, CorruptDataError, InvalidInputError, NotFoundError
from storage.object_store import ObjectStore

RACING_THREADS = 8
RACES = 5


def keys_of(store: ObjectStore, prefix: str = "", start_after: str = "") -> Sequence[str]:
    """Return the keys that a listing yields."""
    return [info.key for info in store.list(prefix, start_after=start_after)]


class ObjectStoreSuite:
    """Guarantees of `ObjectStore`; inherit and define `store`."""

    def test_put_is_readable_at_once(self, store: ObjectStore) -> None:
        """I5: after put has returned, get, head and list see all bytes."""
        store.put("a/b.seg", b"content")
        assert store.get("a/b.seg") == b"content"
        assert store.head("a/b.seg").size_bytes == 7
        assert keys_of(store) == ["a/b.seg"]

    def test_put_joins_buffers_of_all_kinds(self, store: ObjectStore) -> None:
        """Several buffers become one object, in order."""
        store.put("k", [b"he", bytearray(b"ad"), memoryview(b"-tail")[1:], b""])
        assert store.get("k") == b"headtail"

    def test_put_of_many_buffers_keeps_order(self, store: ObjectStore) -> None:
        """More buffers than one system call accepts are still written in order."""
        buffers = [index.to_bytes(2, "big") for index in range(3000)]
        store.put("k", buffers)
        assert store.get("k") == b"".join(buffers)

    def test_empty_object_is_an_object(self, store: ObjectStore) -> None:
        """An empty object differs from a missing one."""
        store.put("k", b"")
        assert store.get("k") == b""
        assert store.head("k").size_bytes == 0

    def test_put_replaces_without_condition(self, store: ObjectStore) -> None:
        """An unconditional put overwrites, also with fewer bytes."""
        store.put("k", b"long content")
        store.put("k", b"short")
        assert store.get("k") == b"short"

    def test_conditional_put_keeps_first_object(self, store: ObjectStore) -> None:
        """I3: create-if-absent never alters an existing object."""
        store.put("k", b"first", if_absent=True)
        with pytest.raises(ConflictError, match="k exists"):
            store.put("k", b"other", if_absent=True)
        with pytest.raises(ConflictError):
            store.put("k", b"first and more", if_absent=True)
        assert store.get("k") == b"first"

    def test_conditional_put_succeeds_when_repeated(self, store: ObjectStore) -> None:
        """I5, I8: the lost response to an own conditional put counts as success."""
        store.put("k", [b"sa", b"me"], if_absent=True)
        store.put("k", b"same", if_absent=True)
        assert keys_of(store) == ["k"]

    def test_missing_object_is_not_found(self, store: ObjectStore) -> None:
        """Every way of reading names the missing key."""
        with pytest.raises(NotFoundError, match="no/such"):
            store.get("no/such")
        with pytest.raises(NotFoundError, match="no/such"):
            store.get_range("no/such", 0, 1)
        with pytest.raises(NotFoundError, match="no/such"):
            store.head("no/such")

    def test_folder_is_not_an_object(self, store: ObjectStore) -> None:
        """A prefix of a key is not an object."""
        store.put("a/b/c", b"x")
        with pytest.raises(NotFoundError):
            store.get("a/b")
        with pytest.raises(NotFoundError):
            store.head("a")

    def test_range_gives_exactly_the_bytes(self, store: ObjectStore) -> None:
        """Ranges at the start, in the middle and at the end, and empty ones, are exact."""
        store.put("k", b"0123456789")
        assert store.get_range("k", 0, 3) == b"012"
        assert store.get_range("k", 4, 2) == b"45"
        assert store.get_range("k", 9, 1) == b"9"
        assert store.get_range("k", 5, 0) == b""

    @pytest.mark.parametrize(("offset", "size"), [(8, 3), (10, 1), (100, 1)])
    def test_range_beyond_the_end_is_corrupt(self, store: ObjectStore, offset: int, size: int) -> None:
        """I10: if an object is shorter than its handle says, the error names the object."""
        store.put("k", b"0123456789")
        with pytest.raises(CorruptDataError, match="k"):
            store.get_range("k", offset, size)

    def test_negative_range_is_refused(self, store: ObjectStore) -> None:
        """Negative offsets and sizes are refused."""
        store.put("k", b"0123456789")
        with pytest.raises(InvalidInputError):
            store.get_range("k", -1, 1)

    def test_list_ascends_across_folders(self, store: ObjectStore) -> None:
        """Keys are listed in byte order, in which '-' and '.' sort before '/', and digits after."""
        keys = ["a-b", "a.b", "a/b", "a/b-c/d", "a/b.c", "a/b/c", "a0", "b"]
        # "a/b" is both an object and a folder, which a file system cannot hold.
        wanted = [key for key in keys if key != "a/b"]
        for key in reversed(wanted):
            store.put(key, b"x")
        assert keys_of(store) == wanted
        assert [info.size_bytes for info in store.list("")] == [1] * len(wanted)

    def test_list_takes_any_prefix(self, store: ObjectStore) -> None:
        """A prefix may end within a name, and a prefix of no key lists nothing."""
        for key in ("job/cp/001.json", "job/cp/002.json", "job/cp2/1", "job/seg/1"):
            store.put(key, b"x")
        assert keys_of(store, "job/cp/") == ["job/cp/001.json", "job/cp/002.json"]
        assert keys_of(store, "job/cp/00") == ["job/cp/001.json", "job/cp/002.json"]
        assert keys_of(store, "job/cp") == ["job/cp/001.json", "job/cp/002.json", "job/cp2/1"]
        assert keys_of(store, "job/none/") == []
        assert keys_of(store, "job/seg/1") == ["job/seg/1"]

    def test_list_starts_after_a_key(self, store: ObjectStore) -> None:
        """`start_after` excludes itself, need not exist, and may be in a folder."""
        keys = ["a/1", "a/2", "a/sub/1", "a/sub/2", "b/1"]
        for key in keys:
            store.put(key, b"x")
        assert keys_of(store, start_after="a/1") == keys[1:]
        assert keys_of(store, start_after="a/sub/1") == keys[3:]
        assert keys_of(store, "a/", start_after="a/15") == keys[1:4]
        assert keys_of(store, start_after="b/1") == []

    def test_modified_time_is_in_milliseconds(self, store: ObjectStore) -> None:
        """Ages are computed from the modified time, so it must be of this century, and equal in head and list."""
        store.put("k", b"x")
        modified_ms = store.head("k").modified_ms
        assert 1_600_000_000_000 < modified_ms < 4_000_000_000_000
        assert [info.modified_ms // 1000 for info in store.list("k")] == [modified_ms // 1000]

    def test_delete_ignores_missing_keys(self, store: ObjectStore) -> None:
        """A repeated delete succeeds, and other keys stay."""
        store.put("a/1", b"x")
        store.put("a/2", b"x")
        store.delete(iter(["a/1", "a/none", "none/1"]))
        store.delete(["a/1"])
        store.delete([])
        assert keys_of(store) == ["a/2"]

    def test_delete_takes_many_keys(self, store: ObjectStore) -> None:
        """More keys than fit one request of a store are deleted in one call."""
        store.put("k/0", b"x")
        store.put("k/1500", b"x")
        store.delete(f"k/{number}" for number in range(1501))
        assert keys_of(store) == []

    @pytest.mark.parametrize(
        "key",
        ["", "/a", "a/", "a//b", "..", "a/../b", "./a", ".tmp/x", "a\\b", "a\nb", "ä", "a" * 256, "a/" * 400 + "a"],
    )
    def test_bad_key_is_refused(self, store: ObjectStore, key: str) -> None:
        """No key reaches outside the store or into its own files."""
        with pytest.raises(InvalidInputError):
            store.put(key, b"x")
        with pytest.raises(InvalidInputError):
            store.get(key)
        with pytest.raises(InvalidInputError):
            store.delete([key])

    def test_bad_prefix_is_refused(self, store: ObjectStore) -> None:
        """A prefix that no key can have is an error, not an empty listing."""
        with pytest.raises(InvalidInputError):
            list(store.list("../"))

    def test_check_writable_leaves_nothing(self, store: ObjectStore) -> None:
        """The check removes its probe object and may be repeated."""
        store.check_writable()
        store.check_writable()
        assert keys_of(store) == []

    def test_close_may_be_repeated(self, store: ObjectStore) -> None:
        """Closing twice succeeds."""
        store.close()
        store.close()


class RaceSuite:
    """Guarantees under concurrent calls; inherit and define `store`."""

    def test_race_of_conditional_puts_has_one_winner(self, store: ObjectStore) -> None:
        """I3: of 8 writers that create one key at the same time exactly one wins, and its bytes stay."""
        for race in range(RACES):
            key, barrier = f"race/{race}", Barrier(RACING_THREADS)

            def create(writer: int, key: str = key, barrier: Barrier = barrier) -> bool:
                barrier.wait()
                try:
                    store.put(key, f"writer {writer}".encode(), if_absent=True)
                except ConflictError:
                    return False
                return True

            with ThreadPoolExecutor(RACING_THREADS) as pool:
                won = list(pool.map(create, range(RACING_THREADS)))
            assert won.count(True) == 1
            assert store.get(key) == f"writer {won.index(True)}".encode()
