"""
Checks how the folder of a file store is mounted, where the mount's options decide whether the store is right.

An NFS client answers "there is no such file" from a cache for up to a minute unless told otherwise. A store relies on
that answer: by it a service learns which checkpoint is the newest and whether its epoch was taken over.
"""

from __future__ import annotations

import logging
import os

from storage.errors import InvalidInputError, UnavailableError

logger = logging.getLogger("storage")

_MOUNTS = "/proc/self/mountinfo"
_NETWORK = ("nfs", "nfs4")
_FRESH = frozenset({"lookupcache=pos", "lookupcache=positive", "lookupcache=none", "noac", "acdirmax=0", "actimeo=0"})
"""Options of which one is enough: absent names are looked up each time."""


def check_folder(folder: str, name: str) -> None:
    """
    Check that the folder's mount suits a store; warn if names in it do not differ by case.

    Where case is ignored, jobs whose names differ in case are one job, and a right to the one is a right to the other.
    That is usual on a developer's laptop, and harmless there.

    Args:
        folder: The store's folder.
        name: Name of a folder in it, in lower case.

    Raises:
        InvalidInputError: See `check_mount`.
    """
    check_mount(folder)
    capitals = os.path.join(folder, name.upper())
    if os.path.exists(capitals) and os.path.samefile(capitals, os.path.join(folder, name)):
        logger.warning("%s ignores the case of names: jobs whose names differ only in case are one job there", folder)


def check_mount(folder: str) -> None:
    """
    Check that the folder's mount answers for the present names; a mount of which nothing is known passes.

    Raises:
        InvalidInputError: It is an NFS mount that caches absent names, or reads without asking the server.
    """
    try:
        device = os.stat(folder).st_dev
        with open(_MOUNTS, encoding="utf-8", errors="replace") as lines:
            mounts = lines.read()
    except OSError:  # not Linux, or the folder cannot be reached: the first call to it says so
        return
    problem = problem_of(mounts, f"{os.major(device)}:{os.minor(device)}")
    if problem:
        raise InvalidInputError(f"folder {folder} is not safe to share: {problem}")


def problem_of(mounts: str, device: str) -> str:
    """
    Return what is wrong with the mount of a device, or nothing.

    Args:
        mounts: Text of Linux's ``/proc/self/mountinfo``.
        device: ``major:minor``.
    """
    for line in mounts.splitlines():
        fields, _, super_fields = line.partition(" - ")
        kind, *source = super_fields.split(" ")
        if fields.split(" ")[2:3] != [device] or kind not in _NETWORK:
            continue
        options = set(source[-1].split(","))
        if "nocto" in options:
            return "its NFS mount does not ask the server when a file is opened; mount it without `nocto`"
        if not options & _FRESH:
            return "its NFS mount caches which names do not exist; mount it with `lookupcache=positive`"
    return ""


def mount_point_of(folder: str) -> str | None:
    """Return where the file system of a folder is mounted; None for that of the root, which is always there."""
    place = os.path.realpath(folder)
    while place != os.path.sep and not is_mount_point(place):
        place = os.path.dirname(place)
    return None if place == os.path.sep else place


def is_mount_point(place: str) -> bool:
    """Say whether a path without links, other than the root, is on another disk than its parent. Two system calls."""
    try:  # with the dot, an automounter mounts it
        return os.stat(os.path.join(place, ".")).st_dev != os.stat(os.path.dirname(place)).st_dev
    except OSError:
        return False


def check_mounted(mount_point: str | None) -> None:
    """
    Check that a file system is still mounted where one was.

    Args:
        mount_point: What `mount_point_of` returned.

    Raises:
        UnavailableError: It was unmounted; what is there now is a folder of another disk.
    """
    if mount_point is not None and not is_mount_point(mount_point):
        raise UnavailableError(f"nothing is mounted on {mount_point} any more; mount the storage's disk again")
