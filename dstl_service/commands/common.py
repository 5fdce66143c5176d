"""Shared by the commands on a job's storage."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO
from urllib.parse import unquote, urlsplit

from dstl_service.access.audit import AuditTrail
from dstl_service.collection.job_deletion import has_leftovers
from dstl_service.collection.tombstones import Deletions
from dstl_service.process.display import printable
from dstl_service.registry.job_store import JobStore
from dstl_service.settings import ServiceSettings
from dstl_service.settings_sources import known_settings, load_settings
from storage.clock import SystemClock, SystemIds
from storage.errors import InvalidInputError, NotFoundError
from storage.object_store import ObjectStore
from storage.open import open_store


def settings_of(options: argparse.Namespace) -> ServiceSettings:
    """Load the settings; command-line options named like settings and ``--set`` win over the other sources."""
    given: dict[str, str | None] = {path: getattr(options, path, None) for path in known_settings()}
    for assignment in options.set:
        path, equals, text = assignment.partition("=")
        if not equals:
            raise InvalidInputError(f"--set {assignment} has no value; the form is --set batch.delay_ms=20")
        setting = known_settings().get(path)
        if setting is not None and setting.is_secret:
            complain(
                f"warning: every user of this host can see {path} on the command line; "
                f"set {setting.variable} in the environment, or use a file"
            )
        given[path] = text
    return load_settings(given, config_path=options.config)


def open_existing(settings: ServiceSettings) -> ObjectStore:
    """
    Open the storage of commands that look for jobs.

    Raises:
        NotFoundError: It is a folder that does not exist; opening it would make it, and show that it has no job.
    """
    parts = urlsplit(settings.storage)
    if parts.scheme == "file" and parts.netloc in ("", "localhost") and not os.path.isdir(unquote(parts.path)):
        raise NotFoundError(f"there is no folder {unquote(parts.path)}; check --storage {settings.storage}")
    return open_store(settings.storage, **settings.store_options())


def open_job(options: argparse.Namespace) -> tuple[ObjectStore, JobStore]:
    """Return the storage and one job of it, which may be a deleted one; `NotFoundError` if there is no such job."""
    settings = settings_of(options)
    store = open_existing(settings)
    job_store = JobStore(store, options.job, SystemClock(), SystemIds())
    if not job_store.exists() and deletions_of(store).of(options.job) is None:
        remedy = (
            " (objects of that name exist: see `dstl fsck --rebuild`, or `dstl delete`)"
            if has_leftovers(store, options.job)
            else f"; `dstl jobs --storage {settings.storage}` lists those that are there"
        )
        raise NotFoundError(f"there is no job {options.job!r} in {settings.storage}{remedy}")
    return store, job_store


def deletions_of(store: ObjectStore) -> Deletions:
    """Return the register of a store's deleted jobs."""
    return Deletions(store, SystemClock(), SystemIds())


class UnwrittenOutputError(Exception):
    """The standard output cannot be written any more: its reader has ended, or its disk is full."""

    def __init__(self, reason: OSError) -> None:
        super().__init__(str(reason))
        self.reason = reason


@contextmanager
def _output() -> Iterator[TextIO]:
    try:
        yield sys.stdout
    except OSError as error:
        raise UnwrittenOutputError(error) from error


def say(*lines: str) -> None:
    """
    Print lines; text from the store in them cannot control the terminal, see `printable`.

    Raises:
        UnwrittenOutputError: They cannot be written.
    """
    with _output() as output:
        output.writelines(f"{printable(line)}\n" for line in lines)


def end_output() -> None:
    """Write what is still buffered; raise like `say`."""
    with _output() as output:
        output.flush()


def complain(text: str) -> None:
    """Print a line to standard error, likewise."""
    sys.stderr.write(f"dstl: {printable(text)}\n")


def record(store: ObjectStore, act: str, job: str, **facts: str) -> None:
    """Write an act of this process's user to the audit log; warn if that fails."""
    trail = AuditTrail(store, SystemClock(), SystemIds())
    trail.record_command(act, job, **facts)
    if trail.failures:
        complain(f"warning: the audit entry of {act!r} could not be stored")
