"""A history of `sink_kit` in which a slot is opened twice at the same time."""

from __future__ import annotations

from contextlib import closing, suppress
from dataclasses import replace
from threading import Event, Thread

from backend_client.testing.sink_history import CHILD_TIMEOUT_S, MARKER, ONCE, History
from backend_client.testing.sink_steps import Publishing, chosen

_OPENINGS = 12
_BLOCKED_S = 0.5


def opened_while_it_is_opened(history: History) -> None:
    """A process is suspended at any step while it opens a slot, which another publisher opens; both then publish."""
    work = replace(history.publishing(0), is_opening=True)
    for number, step in enumerate(chosen(history.publishers.steps(work), _OPENINGS), 1):
        work = replace(history.publishing(number), is_opening=True)
        process = history.publishers.suspended(work, step)
        is_open, may_publish = Event(), Event()
        other = Thread(target=_publish, args=(work, is_open, may_publish))
        other.start()
        is_open.wait(_BLOCKED_S)  # the process may have locked what the other one needs
        history.publishers.resumed(process)
        may_publish.set()
        other.join(CHILD_TIMEOUT_S)
        history.complete(number)
        history.expect(MARKER, work.marker, history.last())
        history.expect(ONCE, history.published(number + 1), sorted(history.seen()))
        if history.is_broken:
            return


def _publish(work: Publishing, is_open: Event, may_publish: Event) -> None:
    """Publish as any publisher does, but stand still once the slot is open and the marker read; an error ends it."""
    with suppress(Exception), closing(work.sink.open(work.slot)) as publisher:
        is_published = publisher.last_published() == work.marker
        is_open.set()
        may_publish.wait(CHILD_TIMEOUT_S)
        if not is_published:
            publisher.publish(work.batches, work.marker)
