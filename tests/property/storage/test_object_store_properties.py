"""A local store and a store in memory agree with a dict after any sequence of operations."""

from __future__ import annotations

import shutil
import tempfile

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from storage.errors import ConflictError, NotFoundError
from storage.local_store import LocalStore
from storage.memory_store import MemoryStore
from storage.object_store import ObjectStore

parts = st.sampled_from(["a", "a-b", "a.b", "a0", "b", "Z", "_"])
keys = st.lists(parts, min_size=1, max_size=3).map("/".join)
contents = st.binary(max_size=5)


class StoresAgree(RuleBasedStateMachine):
    """Applies each operation to both stores and to the model."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.mkdtemp(prefix="dstl-test-")
        self.stores: list[ObjectStore] = [LocalStore(self.folder), MemoryStore()]
        self.model: dict[str, bytes] = {}
        self.ever_put: set[str] = set()

    def teardown(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self.folder)

    def _clashes(self, key: str) -> bool:
        """Return whether files cannot hold the key: it is below an object, or is a folder, and folders stay."""
        below_object = any(key.startswith(f"{other}/") for other in self.model)
        return below_object or any(other.startswith(f"{key}/") for other in self.ever_put)

    @rule(key=keys, content=contents, if_absent=st.booleans())
    def put(self, key: str, content: bytes, if_absent: bool) -> None:
        """I3: an existing object is replaced, kept or found to be the same."""
        if self._clashes(key):
            return
        refused = if_absent and self.model.get(key, content) != content
        for store in self.stores:
            try:
                store.put(key, content, if_absent=if_absent)
            except ConflictError:
                assert refused
            else:
                assert not refused
        if not refused:
            self.model[key] = content
            self.ever_put.add(key)

    @rule(wanted=st.lists(keys, max_size=3))
    def delete(self, wanted: list[str]) -> None:
        """Missing keys are ignored."""
        for store in self.stores:
            store.delete(wanted)
        for key in wanted:
            self.model.pop(key, None)

    @rule(key=keys, offset=st.integers(0, 6), size=st.integers(1, 6))
    def read(self, key: str, offset: int, size: int) -> None:
        """An existing object is read; a missing one is reported as missing."""
        content = self.model.get(key)
        for store in self.stores:
            if content is None:
                with pytest.raises(NotFoundError):
                    store.get(key)
                continue
            assert store.get(key) == content
            assert store.head(key).size_bytes == len(content)
            if offset + size <= len(content):
                assert store.get_range(key, offset, size) == content[offset : offset + size]

    @rule(key=keys, cut=st.integers(0, 5), start_after=st.one_of(st.just(""), keys))
    def list_some(self, key: str, cut: int, start_after: str) -> None:
        """Any prefix and start give the keys in byte order."""
        prefix = key[:cut]
        expected = sorted(found for found in self.model if found.startswith(prefix) and found > start_after)
        for store in self.stores:
            assert [info.key for info in store.list(prefix, start_after=start_after)] == expected

    @invariant()
    def nothing_is_left_over(self) -> None:
        """No temporary file remains after its put."""
        local = self.stores[0]
        assert isinstance(local, LocalStore)
        assert local.remove_leftovers(-(10**9)) == 0


TestStoresAgree = StoresAgree.TestCase
