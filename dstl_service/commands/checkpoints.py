"""Commands on a job's checkpoints: list, savepoints, rewind, fork."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from dstl_service.checkpoints.fork import describe_fork, fork_job
from dstl_service.checkpoints.rewind import describe_rewind, rewind
from dstl_service.commands.common import complain, deletions_of, open_job, record, say, settings_of
from dstl_service.process.display import utc_text
from dstl_service.wire import REMOVED, SET_ASIDE_SUFFIX, SINK, CheckpointInfo, source_offsets
from storage.clock import SystemClock, SystemIds
from storage.errors import InvalidInputError
from storage.key_groups import partition_of


def list_checkpoints(options: argparse.Namespace) -> int:
    """Print a job's checkpoints, oldest first, one per line, as text or JSON."""
    _, job_store = open_job(options)
    manifest = None
    for manifest in job_store.completed():
        info = manifest.info()
        row: dict[str, Any] = {
            "checkpoint": info.ref.to_text(),
            "kind": manifest.kind.value,
            "epoch": info.epoch,
            "created": utc_text(info.created_ms),
            "segments": info.segments,
            "segment_bytes": info.segment_bytes,
        }
        published = {sink.name: sink.published for sink in info.operators if sink.kind == SINK}
        if published:
            row["published"] = published if options.json else _published_text(published)
        waiting, lost = (sum(_rows_of(info, is_lost=is_lost)) for is_lost in (False, True))
        if waiting or lost:
            row["set_aside"] = {"rows": waiting, "lost": lost} if options.json else f"{waiting} rows set aside"
            if lost and not options.json:
                row["set_aside"] += f", {lost} lost"
        row |= _changes_of(info, as_json=options.json)
        sources = source_offsets(info.offsets)
        if sources is not None:
            row["sources"] = sources if options.json else " ".join(map(_compact, sources))
        say(json.dumps(row) if options.json else "  ".join(str(value) for value in row.values()))
    if manifest is None:
        complain(f"job {options.job!r} has completed no checkpoint yet")
    return 0


def list_losses(options: argparse.Namespace) -> int:
    """Print the rows that a job's newest checkpoint lists as lost, one batch and partition per line."""
    _, job_store = open_job(options)
    job_store.open(None)
    newest = job_store.newest()
    operators = newest.operators if newest is not None else ()
    if not any(part.is_lost for operator in operators for part in operator.set_aside):
        complain(f"job {options.job!r} has lost no rows, as of its newest checkpoint")
    labels = {operator.name + SET_ASIDE_SUFFIX: operator.label for operator in operators}
    for operator in operators:
        for part in operator.set_aside:
            if not part.is_lost:
                continue
            row = {
                "operator": labels.get(operator.name, operator.name.removesuffix(SET_ASIDE_SUFFIX)),
                "batch": part.checkpoint_id,
                "key_groups": part.key_groups.to_text(),
                "partition": partition_of(part.key_groups, operator.parallelism, job_store.max_parallelism),
                "rows": part.rows,
                "bytes": part.size_bytes,
            }
            say(json.dumps(row) if options.json else "  ".join(f"{name}={_plain(row[name])}" for name in row))
    return 0


def _plain(value: Any) -> Any:
    return "-" if value is None else value


def _changes_of(checkpoint: CheckpointInfo, *, as_json: bool) -> dict[str, Any]:
    """Return which operators have tables of another name, and which ones were removed; nothing if there are none."""
    renamed = {item.name: item.called for item in checkpoint.operators if item.has_table and item.called is not None}
    removed = [
        item.label for item in checkpoint.operators if item.kind == REMOVED and not item.name.endswith(SET_ASIDE_SUFFIX)
    ]
    found: dict[str, Any] = {}
    if renamed:
        found["renamed"] = (
            renamed if as_json else f"renamed {' '.join(f'{old}->{new}' for old, new in renamed.items())}"
        )
    if removed:
        found["removed"] = removed if as_json else f"removed {' '.join(removed)}"
    return found


def _published_text(published: Mapping[str, int | None]) -> str:
    """Return up to which checkpoint each sink had published when the checkpoint was made, at least."""
    return " ".join(f"{sink}<={'none' if until is None else until}" for sink, until in published.items())


def _rows_of(checkpoint: CheckpointInfo, *, is_lost: bool) -> Iterator[int]:
    for operator in checkpoint.operators:
        yield from (part.rows for part in operator.set_aside if part.is_lost == is_lost)


def _compact(offsets: Any) -> str:
    """Return a source's offsets as one word where the source's own names are."""
    return json.dumps(offsets, separators=(",", ":"))


def savepoints(options: argparse.Namespace) -> int:
    """Create or delete a savepoint if the options say so; then print all."""
    if options.checkpoint is not None and options.create is None:
        raise InvalidInputError("--checkpoint says which checkpoint a savepoint keeps; name it: --create NAME")
    store, job_store = open_job(options)
    job_store.open(None)
    if options.delete is not None:
        job_store.delete_savepoint(options.delete)
        record(store, "delete savepoint", options.job, savepoint=options.delete)
    if options.create is not None:
        deletions_of(store).check(options.job)
        job_store.make_savepoint(options.create, options.checkpoint)
        record(store, "create savepoint", options.job, savepoint=options.create)
    for name, kept in job_store.savepoints.infos():
        say(f"{name}  {kept.checkpoint.ref.to_text()}{f'  for fork {kept.held_for}' if kept.held_for else ''}")
    return 0


def set_back(options: argparse.Namespace) -> int:
    """Rewind a job to a savepoint or checkpoint with ``--write``, else report what would be done."""
    store, job_store = open_job(options)
    deletions_of(store).check(options.job)
    job_store.open(None)
    report = rewind(
        job_store,
        options.job,
        SystemIds(),
        savepoint=options.savepoint,
        checkpoint_id=options.checkpoint,
        checkpoints_max=settings_of(options).retention.checkpoints_max,
        write=options.write,
    )
    if report.is_written:
        record(store, "rewind", options.job, target=report.target, newest=report.newest)
    say(json.dumps(asdict(report)) if options.json else describe_rewind(report))
    return 0


def fork(options: argparse.Namespace) -> int:
    """Create a job that begins with the state of another one."""
    store, job_store = open_job(options)
    deletions_of(store).check(options.job)
    job_store.open(None)
    if options.max_parallelism == job_store.max_parallelism:
        raise InvalidInputError(
            f"job {options.job!r} has max_parallelism {options.max_parallelism} already: to "
            "fork it unchanged, omit --max-parallelism"
        )
    report = fork_job(
        store,
        job_store,
        options.job,
        options.fork,
        SystemClock(),
        SystemIds(),
        savepoint=options.savepoint,
        checkpoint_id=options.checkpoint,
        max_parallelism=options.max_parallelism,
        checkpoints_max=settings_of(options).retention.checkpoints_max,
    )
    record(store, "fork", options.job, fork=report.fork, checkpoint=report.checkpoint)
    record(store, "begin as a fork", report.fork, parent=report.job, checkpoint=report.checkpoint)
    say(json.dumps(asdict(report)) if options.json else describe_fork(report))
    return 0
