"""Downloads are shared and kept on disk, and no fault of the disk is ever an error (I16)."""

from __future__ import annotations

import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dstl_service.formats.materialization_index import encode_index, file_key
from dstl_service.restore import download_cache
from dstl_service.restore.download_cache import DownloadCache
from dstl_service.wire import CheckpointRef
from storage.checksum import checksum128
from storage.errors import CorruptDataError, NotFoundError, UnavailableError
from storage.key_groups import KeyGroupRange
from storage.memory_store import MemoryStore
from storage.segment_format import encode_object
from storage.testing import FakeClock, FakeIds, Fault, FaultKind, FaultyStore, RecordingStore
from tests.unit.dstl_service.samples import segment
from tests.unit.dstl_service.snapshots import index_of
from tests.waiting import wait_until

SST = "job/materialized/op/00000-00127/1.sst"
SEGMENT_OBJECT = b"".join(encode_object([segment()])[0])
INDEX = encode_index(index_of(CheckpointRef(1, 0, "c" * 32)))
SIZE = 3 * 1024 * 1024 + 5
CONTENT = bytes(range(256)) * (SIZE // 256) + b"tail!"


class SharedCacheFolder:
    """A store with a few immutable objects, and caches on one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clock = FakeClock()
        self.faulty = FaultyStore(MemoryStore())
        self.store = RecordingStore(self.faulty)
        self.faulty.put(SST, CONTENT)
        self.made: list[DownloadCache] = []

    def cache(self, bytes_max: int = 10 * SIZE, folder: Path | None = None) -> DownloadCache:
        """Return a cache like that of a separate process."""
        ids = FakeIds(len(self.made))
        self.made.append(DownloadCache(self.store, folder or self.folder, bytes_max, 600, self.clock, ids))
        return self.made[-1]

    def gets(self, key: str = "*") -> int:
        """Return how often the store was asked for bytes."""
        return self.store.count("get", key) + self.store.count("get_range", key)

    @property
    def home(self) -> Path:
        """Return this user's own folder within the given one."""
        return self.folder / f"dstl-downloads-{os.geteuid()}"

    def files(self) -> list[Path]:
        """Return the files that are kept."""
        return [path for path in self.folder.rglob("*") if path.is_file() and path.suffix != ".lock"]


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[SharedCacheFolder]:
    """Return a folder of caches, which are closed at the end."""
    made = SharedCacheFolder(tmp_path / "downloads")
    yield made
    for cache in made.made:
        cache.close()


def test_object_is_downloaded_once(shared: SharedCacheFolder) -> None:
    """Content that was read once is then read from disk, whole or in parts."""
    cache = shared.cache()

    assert [cache.get(SST) for _ in range(3)] == [CONTENT] * 3
    assert cache.get_range(SST, 1_048_570, 20) == CONTENT[1_048_570:1_048_590]
    assert cache.get_range(SST, SIZE - 3, 3) == b"il!"
    assert shared.gets() == 1
    assert (cache.figures.hits, cache.figures.misses, cache.figures.bytes_kept, cache.figures.failures) == (
        4,
        1,
        SIZE,
        0,
    )


@pytest.mark.parametrize(("offset", "size"), [(0, 0), (0, SIZE), (5, 1), (2 << 20, 1 << 20), (SIZE, 0)])
def test_part_is_read(shared: SharedCacheFolder, offset: int, size: int) -> None:
    """Any part is the same from the first download, from disk and from the store."""
    cache = shared.cache()
    parts = [cache.get_range(SST, offset, size) for _ in range(2)]

    assert parts == [CONTENT[offset : offset + size]] * 2
    assert shared.gets() == 1


def test_range_after_end_is_refused_as_by_store(shared: SharedCacheFolder) -> None:
    """A range outside the object is the store's error, before and after the download."""
    cache = shared.cache()
    for _ in range(2):
        with pytest.raises(CorruptDataError):
            cache.get_range(SST, SIZE, 1)
    with pytest.raises(NotFoundError):
        cache.get("job/segments/h/none.seg")
    with pytest.raises(NotFoundError):
        cache.get_range("job/segments/h/none.seg", 0, 1)


def test_concurrent_readers_share_download(shared: SharedCacheFolder) -> None:
    """Ten tables that are restored at once read each object once from the store (ChangelogRecoveryCachingITCase)."""
    keys = [f"job/segments/host/{number}.seg" for number in range(3)]
    for number, key in enumerate(keys):
        shared.faulty.put(key, encode_object([segment(payload=bytes([number]) * 5000)])[0])
    shared.faulty.inject(Fault("get", FaultKind.DELAY, times=None))
    cache = shared.cache()
    begun = threading.Barrier(11)

    def restore(_: int) -> list[bytes]:
        begun.wait(30)
        return [cache.get(key) for key in keys]

    with ThreadPoolExecutor(10) as threads:
        results = [threads.submit(restore, number) for number in range(10)]
        begun.wait(30)
        shared.faulty.release()
        read = [result.result(30) for result in results]

    assert all(one == read[0] for one in read)
    assert [shared.gets(key) for key in keys] == [1, 1, 1]


@pytest.fixture
def large(shared: SharedCacheFolder, monkeypatch: pytest.MonkeyPatch) -> str:
    """The key of a snapshot's file that is too large for memory; its pieces are small."""
    monkeypatch.setattr(download_cache, "OBJECT_BYTES_MAX", SIZE - 1)
    monkeypatch.setattr(download_cache, "PIECE_BYTES", 1024 * 1024)
    key = file_key("job", "op", KeyGroupRange(0, 127), "uid", "000001.sst", checksum128(CONTENT), SIZE)
    shared.faulty.put(key, CONTENT)
    return key


def test_large_file_is_downloaded_once_in_pieces(shared: SharedCacheFolder, large: str) -> None:
    """Two tables read a file that is not held in memory: its key has its size, and each byte comes once."""
    cache = shared.cache()
    offsets = range(0, SIZE, 700_000)

    for _ in range(2):
        parts = [cache.get_range(large, offset, min(700_000, SIZE - offset)) for offset in offsets]
        assert b"".join(parts) == CONTENT

    assert (shared.store.count("head"), shared.gets()) == (0, 4)
    assert cache.figures.bytes_kept == SIZE


def test_large_file_that_came_damaged_is_not_kept(shared: SharedCacheFolder, large: str) -> None:
    """An object that does not match its key is read from the store by each reader, and takes no space."""
    shared.faulty.delete([large])
    shared.faulty.put(large, CONTENT[:-1] + b"?")
    cache = shared.cache()

    assert cache.get_range(large, SIZE - 2, 2) == CONTENT[-2:-1] + b"?"
    assert (cache.figures.bytes_kept, shared.files()) == (0, [])


def test_large_file_without_room_is_read_from_the_store(shared: SharedCacheFolder, large: str) -> None:
    """A file that is larger than the space for downloads costs requests, and no error."""
    cache = shared.cache(bytes_max=SIZE - 1)

    assert cache.get_range(large, 5, 10) == CONTENT[5:15]
    assert cache.figures.bytes_kept == 0


def test_tables_take_large_files_away(shared: SharedCacheFolder, tmp_path: Path, large: str) -> None:
    """Each of two tables takes its own name of one download, which stays theirs when the download makes room (I16)."""
    cache = shared.cache(bytes_max=SIZE + 1)
    taken = [tmp_path / "1.sst", tmp_path / "2.sst"]
    for place in taken:
        path = cache.lend(large, SIZE)
        assert path is not None
        path.rename(place)
    other = large.replace("uid=", "uid-2=")
    shared.faulty.put(other, CONTENT)
    cache.get_range(other, 0, 1)

    assert shared.gets(large) == 4
    assert taken[0].samefile(taken[1])
    assert taken[0].read_bytes() == CONTENT
    assert not any(path.samefile(taken[0]) for path in shared.files())


def test_only_large_files_that_are_kept_are_lent(shared: SharedCacheFolder, large: str) -> None:
    """A file of one piece, and one for which there is no room, are read as bytes."""
    assert shared.cache().lend(SST, 1024 * 1024) is None
    assert shared.cache(bytes_max=SIZE - 1).lend(large, SIZE) is None
    shared.faulty.delete([large])
    shared.faulty.put(large, CONTENT[:-1] + b"?")
    assert shared.cache().lend(large, SIZE) is None


def test_files_that_no_table_takes_fill_no_disk(shared: SharedCacheFolder, tmp_path: Path, large: str) -> None:
    """Names that wait for their tables have the room of the downloads; those that are taken have none."""
    cache = shared.cache(bytes_max=SIZE + 1)
    path = cache.lend(large, SIZE)
    assert path is not None
    assert cache.lend(large, SIZE) is None
    path.rename(tmp_path / "1.sst")

    assert cache.lend(large, SIZE) is not None


def test_file_that_no_table_took_goes_when_idle(shared: SharedCacheFolder, large: str) -> None:
    """A table that died does not keep what was lent to it."""
    cache = shared.cache()
    assert cache.lend(large, SIZE) in shared.files()
    shared.clock.advance(600_000)
    cache.sweep()

    assert shared.files() == []


def test_failed_download_fails_nobody_else(shared: SharedCacheFolder) -> None:
    """If a download fails, the readers that waited for it try themselves."""
    shared.faulty.inject(Fault("get", FaultKind.FAIL_BEFORE))
    cache = shared.cache()
    with pytest.raises(UnavailableError):
        cache.get(SST)

    assert cache.get(SST) == CONTENT


def test_other_objects_are_not_kept(shared: SharedCacheFolder) -> None:
    """Mutable objects are read from the store each time."""
    shared.faulty.put("job/job.json", b"1")
    cache = shared.cache()
    assert (cache.get("job/job.json"), cache.get_range("job/job.json", 0, 1)) == (b"1", b"1")
    shared.faulty.put("job/job.json", b"2")

    assert cache.get("job/job.json") == b"2"
    assert shared.files() == []


def test_large_object_is_read_in_parts(shared: SharedCacheFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the requested part of an object above the limit is read, and nothing is kept."""
    monkeypatch.setattr(download_cache, "OBJECT_BYTES_MAX", SIZE - 1)
    cache = shared.cache()

    assert cache.get_range(SST, 3, 4) == CONTENT[3:7]
    assert shared.store.count("get") == 0
    assert cache.get(SST) == CONTENT
    assert shared.files() == []


def test_space_is_bounded(shared: SharedCacheFolder) -> None:
    """The files never exceed the limit; the least recently read one is removed first."""
    keys = [f"job/materialized/{number}.sst" for number in range(4)]
    for key in keys:
        shared.faulty.put(key, b"x" * 100)
    cache = shared.cache(bytes_max=250)
    for key in (keys[0], keys[1], keys[0], keys[2], keys[0], keys[1]):
        cache.get(key)
        assert cache.figures.bytes_kept == sum(path.stat().st_size for path in shared.files()) <= 250

    assert [shared.gets(key) for key in keys] == [1, 2, 1, 0]
    shared.faulty.put(keys[3], b"x" * 251)
    assert (len(cache.get(keys[3])), cache.figures.bytes_kept) == (251, 200)


def test_cache_of_no_bytes_keeps_nothing(shared: SharedCacheFolder) -> None:
    """The cache can be disabled; then no file is ever created."""
    cache = shared.cache(bytes_max=0)

    assert [cache.get(SST), cache.get_range(SST, 0, 5)] == [CONTENT, CONTENT[:5]]
    assert not shared.folder.exists()


def test_idle_files_are_removed(shared: SharedCacheFolder) -> None:
    """A file that was not read for the idle time is removed; one that was read stays."""
    shared.faulty.put("job/segments/h/1.seg", encode_object([segment()])[0])
    cache = shared.cache()
    cache.get(SST)
    cache.get("job/segments/h/1.seg")
    shared.clock.advance(400_000)
    cache.get(SST)
    shared.clock.advance(200_000)
    cache.sweep()

    assert [path.stat().st_size for path in shared.files()] == [SIZE]
    assert cache.figures.bytes_kept == SIZE
    shared.clock.advance(600_000)
    cache.sweep()
    assert (shared.files(), cache.figures.bytes_kept) == ([], 0)


def test_idle_files_go_by_themselves(shared: SharedCacheFolder, tmp_path: Path) -> None:
    """Idle files are removed without any further read."""
    cache = DownloadCache(shared.store, tmp_path / "own", 10 * SIZE, 1, shared.clock, FakeIds(77))
    shared.made.append(cache)
    cache.get(SST)
    shared.clock.advance(1_000)

    wait_until(lambda: not cache.figures.bytes_kept)


def flip(path: Path) -> None:
    """Flip a bit in the middle."""
    with open(path, "r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize(
    "damage",
    [
        flip,
        lambda path: os.truncate(path, SIZE // 2),
        lambda path: os.truncate(path, 0),
        Path.unlink,
        lambda path: shutil.rmtree(path.parent),
        lambda path: (path.unlink(), path.mkdir()),
    ],
    ids=["flipped", "cut", "empty", "deleted", "folder deleted", "replaced"],
)
@pytest.mark.parametrize("in_parts", [False, True])
def test_damaged_file_is_read_from_store(
    shared: SharedCacheFolder, damage: Callable[[Path], Any], in_parts: bool
) -> None:
    """I16, I10: a damaged file is dropped; the object is read from the store and kept again, without an error."""
    cache = shared.cache()

    def read() -> bytes:
        return cache.get_range(SST, SIZE // 2 - 10, 100) if in_parts else cache.get(SST)

    expected = read()
    (path,) = shared.files()
    damage(path)

    assert [read() for _ in range(4)] == [expected] * 4
    # If the folder itself is gone, the first write of the file fails.
    assert (shared.gets(), cache.figures.failures) == ((2, 1) if path.parent.exists() else (3, 2))
    assert len(shared.files()) == 1


@pytest.mark.parametrize(
    ("key", "data"),
    [
        ("job/segments/h/1.seg", SEGMENT_OBJECT),
        (file_key("job", "op", KeyGroupRange(0, 127), "uid", "000001.sst", checksum128(CONTENT), SIZE), CONTENT),
        (file_key("job", "op", KeyGroupRange(0, 127), "uid", "CURRENT", checksum128(b"file"), 4), b"file"),
        ("job/materialized/op/00000-00127/uid.json", INDEX),
    ],
)
def test_damaged_download_is_not_kept(shared: SharedCacheFolder, key: str, data: bytes) -> None:
    """I10: a damaged download is returned to its reader, who detects it, and is not kept; a sound one is."""
    shared.faulty.put(key, data[:-1])
    cache = shared.cache()
    assert cache.get(key) == data[:-1]
    shared.faulty.put(key, data)

    assert [cache.get(key) for _ in range(3)] == [data] * 3
    assert shared.gets(key) == 2


@pytest.mark.parametrize("kind", ["a file", "below a file", "of others"])
def test_unusable_folder_only_slows(shared: SharedCacheFolder, tmp_path: Path, kind: str) -> None:
    """I16: if no file can be written, or others could write it, everything is read from the store."""
    folder = tmp_path / "folder"
    if kind == "of others":
        folder.mkdir()
        folder.chmod(0o777)
    else:
        folder.write_bytes(b"")
    cache = shared.cache(folder=folder / "below" if kind == "below a file" else folder)

    assert [cache.get(SST) for _ in range(3)] == [CONTENT] * 3
    assert (shared.gets(), cache.figures.bytes_kept, cache.figures.failures) == (3, 0, 3)


def test_files_are_private(shared: SharedCacheFolder) -> None:
    """Only the service's user can read the cached files."""
    shared.cache().get(SST)
    (path,) = shared.files()

    assert [stat.S_IMODE(folder.stat().st_mode) for folder in (shared.home, path.parent)] == [0o700, 0o700]


def test_close_removes_files_and_may_be_repeated(shared: SharedCacheFolder) -> None:
    """Closing removes all files, closing twice is harmless, and a late reader is still served."""
    cache = shared.cache()
    cache.get(SST)
    cache.close()
    cache.close()

    assert list(shared.home.iterdir()) == []
    assert cache.get(SST) == CONTENT
    assert list(shared.home.iterdir()) == []


def test_files_of_dead_processes_are_removed(shared: SharedCacheFolder) -> None:
    """Files of dead processes are removed by the next one; those of a living process stay."""
    living = shared.cache()
    living.get(SST)
    dead = shared.home / f"part-{'0' * 32}"
    dead.mkdir()
    (dead / "1").write_bytes(CONTENT)
    Path(f"{dead}.lock").touch()
    other = shared.cache()
    other.get(SST)

    assert len(shared.files()) == 2
    assert {path.stat().st_size for path in shared.files()} == {SIZE}
    assert not Path(f"{dead}.lock").exists()
    living.get(SST)
    assert living.figures.hits == 1


def test_nothing_foreign_is_removed(shared: SharedCacheFolder) -> None:
    """Whatever folder a user configures, only files with this cache's own mark are removed: name and lock."""
    foreign = [
        shared.folder / "photos" / "1.jpg",
        shared.folder / f"part-{'1' * 32}" / "thesis",
        shared.home / "photos" / "2.jpg",
        shared.home / f"part-{'2' * 32}" / "without-lock",
        shared.home / "part-notes.lock",
    ]
    for path in foreign:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"precious")
    (shared.folder / f"part-{'1' * 32}.lock").touch()
    shared.home.chmod(0o700)
    cache = shared.cache()
    cache.get(SST)
    assert len([path for path in shared.home.rglob("part-*/1") if path.is_file()]) == 1
    cache.close()

    assert [path for path in foreign if not path.is_file()] == []


@pytest.mark.parametrize("place", ["home", "part"])
def test_planted_link_leads_nowhere(shared: SharedCacheFolder, tmp_path: Path, place: str) -> None:
    """The target of a link in the folder stays unchanged, whether the link replaces the cache folder or part of it."""
    victim = tmp_path / "victim" / f"part-{'3' * 32}"
    victim.mkdir(parents=True)
    (victim / "diary").write_bytes(b"precious")
    Path(f"{victim}.lock").touch()
    shared.home.parent.mkdir(parents=True)
    if place == "home":
        shared.home.symlink_to(victim.parent)
        strange_link(shared.home)
    else:
        shared.home.mkdir(mode=0o700)
        (shared.home / f"part-{'4' * 32}").symlink_to(victim)
        (shared.home / f"part-{'4' * 32}.lock").symlink_to(f"{victim}.lock")
        (shared.home / f"part-{'5' * 32}").symlink_to(victim)
        (shared.home / f"part-{'5' * 32}.lock").touch()

    assert shared.cache().get(SST) == CONTENT
    assert (victim / "diary").is_file()


def strange_link(link: Path) -> None:
    """Let a link belong to another user or, if that is impossible, lead through a folder that others can write."""
    if os.geteuid() == 0:
        os.chown(link, 65534, 65534, follow_symlinks=False)
    else:
        link.resolve().chmod(0o777)
