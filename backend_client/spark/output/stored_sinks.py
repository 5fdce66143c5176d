"""A sink and those that its job had before: none is left with unpublished output unnoticed. No I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from backend_client.sinks.slot_publishing import Target
from dstl_service.wire import CLOSED_SINK, SINK, CheckpointInfo, OperatorInfo
from storage.errors import InvalidInputError


def check_columns(names: Sequence[str]) -> None:
    """Raise `InvalidInputError` if a sink could not tell columns apart."""
    if twice := sorted(name for name, count in Counter(names).items() if count > 1):
        raise InvalidInputError(f"the result has several columns {', '.join(twice)}: rename all but one of each")


def closed_sinks(
    latest: CheckpointInfo | None, name: str, system: str, abandoned: frozenset[str]
) -> tuple[OperatorInfo, ...]:
    """
    Return the stored sinks that a query no longer has, as closed ones.

    Args:
        latest: The job's newest checkpoint.
        name: Name of the query's sink; empty without one.
        system: The kind of the sink.
        abandoned: Sinks whose unpublished output the user gave up.

    Raises:
        InvalidInputError: Output of one may be unpublished, and the user did not give it up; or the query's sink was of
            another kind, or has the name of an operator's table.
    """
    if latest is not None and any(info.name == name and not info.is_sink for info in latest.operators):
        raise InvalidInputError(
            f"the job has, or had, state of an operator under the name {name!r}: give the sink another one, name=…"
        )
    closed = []
    for stored in stored_sinks(latest).values():
        assert latest is not None
        if stored.name == name:
            if stored.kind == SINK and stored.key_schema != system:
                raise InvalidInputError(
                    f"sink {name!r} was a {stored.key_schema}, now it is a {system}: give the new one another name"
                )
        elif stored.kind == CLOSED_SINK:
            closed.append(stored)
        elif stored.name in abandoned:
            closed.append(replace(stored, kind=CLOSED_SINK, published=latest.ref.id))
        else:
            raise InvalidInputError(
                f"the query no longer has sink {stored.name!r}, to which output up to batch {latest.ref.id} may still "
                "have to be published: start and stop it once more with that sink, which publishes everything, and "
                f"then add option('abandonOutput', {stored.name!r})"
            )
    return tuple(closed)


def stored_sinks(latest: CheckpointInfo | None) -> dict[str, OperatorInfo]:
    """Return the sinks that a checkpoint knows, by name."""
    return {info.name: info for info in latest.operators if info.is_sink} if latest else {}


def first_target(
    latest: CheckpointInfo, stored: OperatorInfo | None, slots: int, checkpoints: Sequence[CheckpointInfo] = ()
) -> tuple[Target, bool]:
    """
    Return what a start has to publish, and whether it must be published before anything is built on it.

    Args:
        latest: The job's newest checkpoint.
        stored: What that says of the sink; None if it does not know it.
        slots: The query's number of slots.
        checkpoints: The newest one and its stored predecessors.
    """
    known = stored if stored is not None and stored.kind == SINK else None
    recent = tuple(known.recent) if known is not None else ()
    # A slot that the newest checkpoint does not use may have a marker from before a rewind.
    begins = known is None or slots > known.parallelism or latest.rewound_from is not None
    stored_refs = tuple(info.ref for info in checkpoints)
    if begins and latest.base is not None and latest.base not in stored_refs:
        # No longer stored, as after a rewind to a savepoint; the sink must know its branch nevertheless.
        stored_refs = (latest.base, *stored_refs)
    target = Target(
        latest.ref,
        starts_branch=begins,
        given_up=stored.published if stored is not None and known is None else None,
        marked_slots=known.parallelism if known is not None and known.published is not None else 0,
        published=known.published if known is not None else None,
        stored=stored_refs,
        used_slots=_slots_before(latest, known, checkpoints),
        recent=recent,
        # A rebuild begins a branch, too, but does not know all that was lost.
        given_up_from=latest.rewound_from if latest.rewound_from in recent else None,
        former_slots=known.former_slots if known is not None else None,
    )
    return target, begins or known is None or slots != known.parallelism


def steps_to(target: Target) -> list[Target]:
    """
    Return what a start has published one after the other: each stored checkpoint that may be unpublished, in order.

    As while a query runs: all at once may have columns that do not fit together, if the query was changed meanwhile, or
    take longer than the system lets a transaction last.
    """
    if target.starts_branch:
        return [target]
    newest, published = target.checkpoint, -1 if target.published is None else target.published
    before = [ref for ref in target.stored if ref.branch == newest.branch and published < ref.id < newest.id]
    return [*(replace(target, checkpoint=ref) for ref in sorted(before, key=lambda ref: ref.id)), target]


def _slots_before(latest: CheckpointInfo, known: OperatorInfo | None, checkpoints: Sequence[CheckpointInfo]) -> int:
    """Return how many of a sink's slots are known to have been in use, whatever a rewind to `latest` has altered."""
    if known is None:
        return 0
    of_base = next((stored_sinks(info).get(known.name) for info in checkpoints if info.ref == latest.base), None)
    return of_base.parallelism if of_base is not None and of_base.kind == SINK else 1
