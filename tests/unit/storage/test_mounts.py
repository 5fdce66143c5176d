"""Which mounts a file store accepts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from storage import mounts
from storage.errors import InvalidInputError
from storage.local_store import LocalStore
from storage.mounts import problem_of

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
