"""Which mounts a file store accepts."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from storage import mounts
from storage.errors import InvalidInputError, UnavailableError
from storage.local_store import LocalStore
from storage.mounts import mount_point_of, problem_of

LOCAL = "22 28 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw,errors=remount-ro"


def nfs(options: str, kind: str = "nfs4") -> str:
    """Return the mounts of a host with an NFS mount as device 0:45."""
    return f"{LOCAL}\n41 22 0:45 /export /mnt/my\\040state rw,relatime shared:9 - {kind} filer:/export {options}\n"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ("rw,vers=4.2,hard", "lookupcache=positive"),
        ("rw,vers=4.2,lookupcache=pos,hard", ""),
        ("rw,lookupcache=none", ""),
        ("rw,noac", ""),
        ("rw,acdirmin=0,acdirmax=0", ""),
        ("rw,lookupcache=pos,nocto", "without `nocto`"),
    ],
)
@pytest.mark.parametrize("kind", ["nfs", "nfs4"])
def test_nfs_has_to_look_absent_names_up(kind: str, options: str, problem: str) -> None:
    """I4: an NFS mount that caches the absence of names is refused, with the option to set."""
    found = problem_of(nfs(options, kind), "0:45")

    assert (problem in found) if problem else not found


@pytest.mark.parametrize("device", ["8:1", "0:99"])
def test_other_mounts_are_accepted(device: str) -> None:
    """A local disk is accepted, and so is a device that is not in the table of mounts."""
    assert not problem_of(nfs("rw"), device)


def test_store_on_such_a_mount_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check before the first write names the folder and the option."""
    device = tmp_path.stat().st_dev
    table = tmp_path / "mountinfo"
    table.write_text(nfs("rw").replace("0:45", f"{os.major(device)}:{os.minor(device)}"), encoding="utf-8")
    monkeypatch.setattr(mounts, "_MOUNTS", str(table))

    with pytest.raises(InvalidInputError, match=rf"{tmp_path}.*lookupcache=positive"):
        LocalStore(tmp_path / "store").check_writable()


def test_systems_without_a_table_of_mounts_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the system has no table of mounts, the store works."""
    monkeypatch.setattr(mounts, "_MOUNTS", str(tmp_path / "missing"))

    LocalStore(tmp_path / "store").check_writable()


def test_unmounted_disk_is_no_empty_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """I11: where the disk was unmounted, nothing is absent, stored or deleted, until it is mounted again."""
    disk, away, mounted = tmp_path / "disk", tmp_path / "away", {str(tmp_path / "disk")}
    disk.mkdir()
    monkeypatch.setattr(mounts, "is_mount_point", mounted.__contains__)
    store = LocalStore(disk / "state")
    store.put("job/a", b"there")
    disk.rename(away)
    disk.mkdir()  # as the mount point is without its disk
    mounted.remove(str(disk))
    calls: list[Callable[[], object]] = [
        lambda: store.get("job/a"),
        lambda: store.head("job/a"),
        lambda: list(store.list("")),
        lambda: store.delete(["job/a"]),
        lambda: store.put("job/b", b"new", if_absent=True),
    ]
    for call in calls:
        with pytest.raises(UnavailableError, match=r"nothing is mounted on .*disk any more"):
            call()
    assert list(disk.rglob("*")) == []

    disk.rmdir()
    away.rename(disk)
    mounted.add(str(disk))
    assert store.get("job/a") == b"there"
    assert [info.key for info in store.list("")] == ["job/a"]


def test_disk_that_goes_during_a_put_acknowledges_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A put that finds its disk gone at the end is not acknowledged: what it wrote may be on another one."""
    answers = iter([True])  # where it is looked for
    monkeypatch.setattr(mounts, "is_mount_point", lambda _: next(answers, False))
    store = LocalStore(tmp_path)
    answers = iter([True, False])
    with pytest.raises(UnavailableError, match="nothing is mounted"):
        store.put("a", b"new")


def test_root_is_always_mounted() -> None:
    """A store on the root's disk is not looked after."""
    assert mount_point_of("/") is None
