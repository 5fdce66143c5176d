"""A folder as a store: disk full, read-only, after a crash, or shared with foreign files."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from storage.errors import (
    ConflictError,
    CorruptDataError,
    DstlError,
    InvalidInputError,
    NotFoundError,
    UnavailableError,
)
from storage.local_store import LocalStore
from storage.testing import FakeClock


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    """Return an empty store."""
    return LocalStore(tmp_path / "base")


def leftovers(store: LocalStore) -> list[str]:
    """Return the names of the temporary files."""
    return os.listdir(f"{store.url.removeprefix('file://')}/.tmp")


def raiser(code: int) -> object:
    """Return a function that fails like a system call."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


def test_relative_path_is_refused() -> None:
    """A path that depends on a process's working folder would split the state."""
    with pytest.raises(InvalidInputError, match="absolute"):
        LocalStore("some/folder")


def test_range_beyond_two_gibibytes_is_read(store: LocalStore) -> None:
    """Offsets are not limited to 31 bits: the end of a sparse 5 GiB object is read correctly."""
    store.put("big", b"")
    size = 5 << 30
    with open(f"{store.url.removeprefix('file://')}/big", "r+b") as file:
        file.truncate(size - 3)
        file.seek(size - 3)
        file.write(b"end")

    assert store.head("big").size_bytes == size
    assert store.get_range("big", size - 3, 3) == b"end"


def test_object_of_any_size_is_not_read_at_once(store: LocalStore) -> None:
    """Another writer of the storage makes a file of a terabyte in no time; as a document it would take all memory."""
    store.put("job/job.json", b"")
    os.truncate(f"{store.url.removeprefix('file://')}/job/job.json", 1 << 40)

    with pytest.raises(CorruptDataError, match=r"object job/job\.json is damaged: it has 1099511627776 bytes"):
        store.get("job/job.json")


@pytest.mark.parametrize("if_absent", [True, False])
@pytest.mark.parametrize(
    ("call", "code", "advice"),
    [
        ("writev", errno.ENOSPC, "no space is left"),
        ("fsync", errno.EIO, "Input/output error"),
        ("fsync", errno.EDQUOT, "quota"),
        ("close", errno.ENOSPC, "no space is left"),
        ("open", errno.EACCES, "permission denied"),
        ("open", errno.EROFS, "mounted read-only"),
    ],
)
def test_failed_write_leaves_no_object(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, call: str, code: int, advice: str, if_absent: bool
) -> None:
    """I5: a failure of any step, including the close, is an error with a remedy, and no object is visible."""
    with monkeypatch.context() as patch:
        patch.setattr(os, call, raiser(code))
        with pytest.raises(UnavailableError, match=advice) as caught:
            store.put("k", b"x", if_absent=if_absent)
    assert caught.value.context == {"key": "k", "errno": code}
    assert list(store.list("")) == []
    assert leftovers(store) == []
    store.put("k", b"x", if_absent=if_absent)


def test_failed_replacement_keeps_old_object(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """I3: an object is replaced entirely or not at all."""
    store.put("k", b"old")
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", raiser(errno.EIO))
        with pytest.raises(UnavailableError):
            store.put("k", b"new")
    assert store.get("k") == b"old"


def test_missing_hard_links_are_reported(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """I3: the check refuses a file system without hard links, with the reason."""
    monkeypatch.setattr(os, "link", raiser(errno.EPERM))
    with pytest.raises(UnavailableError, match="must have hard links"):
        store.check_writable()


def test_lost_answer_of_link_is_success(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """I5: a mount may repeat a `link` whose response was lost and then find its own file; that is success."""
    link = os.link

    def link_twice(source: str, target: str, **given: Any) -> None:
        link(source, target, **given)
        link(source, target, **given)

    monkeypatch.setattr(os, "link", link_twice)
    store.put("k", b"mine", if_absent=True)
    assert store.get("k") == b"mine"


def test_short_writes_are_continued(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system call that writes fewer bytes than requested loses none."""
    writev = os.writev

    def write_three_bytes(file: int, buffers: list[memoryview]) -> int:
        return writev(file, [b"".join(buffers)[:3]])

    monkeypatch.setattr(os, "writev", write_three_bytes)
    store.put("k", [b"01", b"", b"2345678", b"9"])
    assert store.get("k") == b"0123456789"


def test_names_are_flushed_to_the_device(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """I5: the file, its folder and each new folder above it are flushed before put returns; known folders only once."""
    flushed: list[str] = []
    fsync = os.fsync

    def record(file: int) -> None:
        flushed.append(os.path.basename(os.readlink(f"/proc/self/fd/{file}")))
        fsync(file)

    monkeypatch.setattr(os, "fsync", record)
    store.put("a/b/1", b"x")
    assert flushed[:2] == ["base", "a"]
    assert flushed[3:] == ["b"]
    del flushed[:]
    store.put("a/b/2", b"x")
    assert flushed[1:] == ["b"]


@pytest.mark.parametrize("data", [b"same", b"other"])
def test_what_refused_a_put_is_flushed_to_the_device(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    """I5: a refused writer relies on the existing object, whose own writer may have died before flushing its name."""
    store.put("a/1", b"same", if_absent=True)
    flushed: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda file: flushed.append(os.readlink(f"/proc/self/fd/{file}")))
    with suppress(ConflictError):
        store.put("a/1", data, if_absent=True)

    assert os.path.basename(flushed[-1]) == "a"


def test_deletions_are_flushed_to_the_device(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """I11: a loss of power does not bring deleted objects back; each folder is flushed once, after all deletions."""
    for key in ("a/1", "a/2", "b/1"):
        store.put(key, b"x")
    flushed: list[tuple[str, list[str]]] = []

    def record(file: int) -> None:
        folder = os.readlink(f"/proc/self/fd/{file}")
        flushed.append((os.path.basename(folder), os.listdir(folder)))

    monkeypatch.setattr(os, "fsync", record)
    store.delete(["a/1", "a/2", "b/1", "c/1"])
    assert flushed == [("a", []), ("b", [])]


def test_empty_folders_age_out(tmp_path: Path) -> None:
    """An empty folder that was unused for long is removed; others stay."""
    clock = FakeClock()
    store = LocalStore(tmp_path, clock=clock)
    for key in ("job/segments/gone/1", "job/segments/young/1", "job/segments/used/1"):
        store.put(key, b"x")
    store.delete(["job/segments/gone/1", "job/segments/young/1"])
    for name, age_ms in (("gone", 60_000), ("used", 60_000), ("young", 1_000)):
        modified_ns = (clock.now_ms() - age_ms) * 1_000_000
        os.utime(tmp_path / "job" / "segments" / name, ns=(modified_ns, modified_ns))
    assert store.remove_empty_folders("job/segments", 30_000) == 1
    assert sorted(os.listdir(tmp_path / "job" / "segments")) == ["used", "young"]


@pytest.mark.parametrize("if_absent", [True, False])
def test_folder_removed_during_a_put_is_made_again(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, if_absent: bool
) -> None:
    """A put whose folder is removed just before the file gets its name still succeeds."""
    store.put("a/1", b"x")
    store.delete(["a/1"])
    link, rename = os.link, os.rename
    removed: list[str] = []

    def meddling(name: Callable[..., None]) -> Callable[..., None]:
        def act(source: str, target: str, **given: Any) -> None:
            if not removed:
                removed.append(os.readlink(f"/proc/self/fd/{given['dst_dir_fd']}"))
                os.rmdir(removed[0])
            name(source, target, **given)

        return act

    monkeypatch.setattr(os, "link", meddling(link))
    monkeypatch.setattr(os, "rename", meddling(rename))
    store.put("a/2", b"x", if_absent=if_absent)
    assert (len(removed), store.get("a/2")) == (1, b"x")


def test_folder_deleted_by_others_is_made_again(store: LocalStore, tmp_path: Path) -> None:
    """A deleted folder does not stop later puts."""
    store.put("a/1", b"x")
    store.delete(["a/1"])
    (tmp_path / "base" / "a").rmdir()
    (tmp_path / "base" / ".tmp").rmdir()
    store.put("a/2", b"x")
    assert store.get("a/2") == b"x"


@pytest.mark.parametrize("if_absent", [True, False])
def test_object_and_folder_of_one_name_are_refused(store: LocalStore, if_absent: bool) -> None:
    """Key combinations that S3 allows and file systems cannot hold are refused before anything is written."""
    store.put("a/b", b"x")
    with pytest.raises(InvalidInputError, match="the same name"):
        store.put("a", b"x", if_absent=if_absent)
    with pytest.raises(InvalidInputError, match="the same name"):
        store.put("a/b/c", b"x", if_absent=if_absent)
    assert [info.key for info in store.list("")] == ["a/b"]


def test_leftovers_are_not_listed_and_age_out(tmp_path: Path) -> None:
    """A crashed writer's temporary file is never an object, and is deleted only after its minimum age."""
    clock = FakeClock()
    store = LocalStore(tmp_path, clock=clock)
    for name, age_ms in ((f"{0:032x}", 60_000), (f"{1:032x}", 1_000), ("not ours", 60_000)):
        path = tmp_path / ".tmp" / name
        path.write_bytes(b"half an obj")
        modified_ns = (clock.now_ms() - age_ms) * 1_000_000
        os.utime(path, ns=(modified_ns, modified_ns))
    assert list(store.list("")) == []
    assert store.remove_leftovers(30_000) == 1
    assert sorted(leftovers(store)) == [f"{1:032x}", "not ours"]


def test_leftovers_are_not_looked_for_after_a_link(tmp_path: Path) -> None:
    """A link in place of the folder of temporary files does not lead to deletions elsewhere."""
    store = LocalStore(tmp_path / "base", clock=FakeClock())
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / f"{0:032x}").write_bytes(b"precious")
    os.utime(victim / f"{0:032x}", (0, 0))
    (tmp_path / "base" / ".tmp").rmdir()
    (tmp_path / "base" / ".tmp").symlink_to(victim)

    with pytest.raises(DstlError):
        store.remove_leftovers(0)
    assert len(list(victim.iterdir())) == 1


def test_files_of_strangers_are_not_listed(store: LocalStore, tmp_path: Path) -> None:
    """Names that are not keys, and links to folders, are skipped."""
    store.put("a/1", b"x")
    (tmp_path / "base" / "a" / "with space").write_bytes(b"x")
    (tmp_path / "base" / "a" / ".nfs0001").write_bytes(b"x")
    (tmp_path / "base" / "loop").symlink_to(tmp_path / "base")
    assert [info.key for info in store.list("")] == ["a/1"]


def test_links_of_folders_are_not_followed(store: LocalStore, tmp_path: Path) -> None:
    """C28: a link that another writer of the storage planted leads no listing, deletion or put to files elsewhere."""
    store.put("job/segments/host/1", b"x")
    elsewhere = tmp_path / "elsewhere"
    os.rename(tmp_path / "base" / "job" / "segments", elsewhere)
    (tmp_path / "base" / "job" / "segments").symlink_to(elsewhere)

    for call in (
        lambda: list(store.list("job/segments/")),
        lambda: list(store.list("job/segments/host/")),
        lambda: store.delete(["job/segments/host/1"]),
        lambda: store.put("job/segments/host/1", b"y"),
        lambda: LocalStore(tmp_path / "base").put("job/segments/new/1", b"y"),
        lambda: store.remove_empty_folders("job/segments", -1),
        lambda: store.get("job/segments/host/1"),
        lambda: store.get_range("job/segments/host/1", 0, 1),
        lambda: store.head("job/segments/host/1"),
    ):
        with pytest.raises(UnavailableError, match="is a link, which is not followed"):
            call()

    assert [path.read_bytes() for path in elsewhere.rglob("*") if path.is_file()] == [b"x"]


@pytest.mark.parametrize("if_absent", [True, False])
def test_folder_that_becomes_a_link_is_not_followed(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, if_absent: bool
) -> None:
    """C32: a folder that was looked at and is a link when the file gets its name leads no put to files elsewhere."""
    store.put("job/1", b"x")
    (tmp_path / "elsewhere").mkdir()
    folder = tmp_path / "base" / "job"

    def redirecting(name: Callable[..., None]) -> Callable[..., None]:
        def act(*paths: str, **given: Any) -> None:
            monkeypatch.undo()
            os.rename(folder, tmp_path / "aside")
            folder.symlink_to(tmp_path / "elsewhere")
            name(*paths, **given)

        return act

    monkeypatch.setattr(os, "link", redirecting(os.link))
    monkeypatch.setattr(os, "rename", redirecting(os.rename))
    with suppress(UnavailableError):
        store.put("job/2", b"y", if_absent=if_absent)

    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert sorted(path.name for path in (tmp_path / "aside").iterdir()) == ["1", "2"]


def test_links_of_files_are_not_followed(store: LocalStore, tmp_path: Path) -> None:
    """C32: a link in the place of an object leads no reader to a file elsewhere, which may be another one's secret."""
    store.put("job/1", b"x")
    (tmp_path / "token").write_bytes(b"secret")
    (tmp_path / "base" / "job" / "2").symlink_to(tmp_path / "token")

    for call in (
        lambda: store.get("job/2"),
        lambda: store.get_range("job/2", 0, 1),
        lambda: store.head("job/2"),
        lambda: store.put("job/2", b"secret", if_absent=True),
    ):
        with pytest.raises(UnavailableError, match="is a link, which is not followed"):
            call()
    assert [info.key for info in store.list("job/")] == ["job/1"]

    store.put("job/2", b"mine")
    assert (store.get("job/2"), (tmp_path / "token").read_bytes()) == (b"mine", b"secret")


def test_base_may_be_a_link(tmp_path: Path) -> None:
    """The administrator, who names the folder, may name a link to it."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "base").symlink_to(tmp_path / "disk")
    store = LocalStore(tmp_path / "base")
    store.put("a/1", b"x")

    assert [info.key for info in store.list("")] == ["a/1"]
    store.delete(["a/1"])
    assert not list(store.list(""))


def test_pipe_blocks_no_reader(store: LocalStore, tmp_path: Path) -> None:
    """A pipe in the place of an object is no object; opening it would wait for ever for somebody to write."""
    store.put("job/1", b"x")
    os.mkfifo(tmp_path / "base" / "job" / "2")

    for read in (store.get, store.head, lambda key: store.get_range(key, 0, 1)):
        with pytest.raises(NotFoundError):
            read("job/2")
    assert [info.key for info in store.list("job/")] == ["job/1"]


def test_deep_folders_end_no_listing(store: LocalStore, tmp_path: Path) -> None:
    """Folders that are deeper than any key are passed over, whoever made them."""
    store.put("job/z", b"x")
    place = os.open(tmp_path / "base" / "job", os.O_RDONLY)
    for _ in range(1100):
        os.mkdir("a", dir_fd=place)
        inner = os.open("a", os.O_RDONLY, dir_fd=place)
        os.close(place)
        place = inner
    os.close(place)
    try:
        assert [info.key for info in store.list("job/")] == ["job/z"]
    finally:  # too deep for Python
        subprocess.run(["rm", "-rf", str(tmp_path / "base" / "job" / "a")], check=True)


def test_two_stores_share_a_folder(store: LocalStore, tmp_path: Path) -> None:
    """I3: create-if-absent holds between processes that share only the folder."""
    LocalStore(tmp_path / "base").put("k", b"first", if_absent=True)
    with pytest.raises(ConflictError):
        store.put("k", b"second", if_absent=True)


def test_impossible_folder_is_reported(tmp_path: Path) -> None:
    """A base below a file cannot be created."""
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DstlError, match="cannot make"):
        LocalStore(tmp_path / "file" / "base")


def test_disk_that_ignores_case_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """C12: on such a disk, jobs `orders` and `Orders` would share objects; a link simulates it."""
    store = LocalStore(tmp_path)
    (tmp_path / ".TMP").mkdir()
    store.check_writable()
    assert not caplog.messages
    (tmp_path / ".TMP").rmdir()
    (tmp_path / ".TMP").symlink_to(tmp_path / ".tmp")

    store.check_writable()

    assert "ignores the case" in caplog.text
