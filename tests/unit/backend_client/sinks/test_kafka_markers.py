"""Where a slot's marker is looked for when brokers answer differently."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError

from backend_client.sinks.kafka import markers
from backend_client.sinks.protocol import Marker, Slot
from dstl_service.wire import CheckpointRef

SLOT = Slot("job", "uid", "out", 0)
END_OF_PARTITION = KafkaError(-191)


def _record(offset: int) -> Any:
    text = Marker("uid", 0, CheckpointRef(offset, 0, f"m{offset}")).to_text()
    return SimpleNamespace(error=lambda: None, key=lambda: b"uid", value=text.encode, offset=lambda: offset)


def _end(offset: int) -> Any:
    return SimpleNamespace(error=lambda: END_OF_PARTITION, offset=lambda: offset)


class Brokers:
    """A partition with two markers, of which a new leader knows one at first."""

    def __init__(self, _: object) -> None:
        self._answers = [_record(0), _end(1), _record(1), _end(2)]
        self._known = 0

    def get_watermark_offsets(self, _: object, *, timeout: float = 0.0, cached: bool = False) -> tuple[int, int]:
        """Return first and last offset; those of the last answer if they are cached."""
        return 0, self._known if cached else 2

    def assign(self, _: object) -> None:
        """Begin at the first record."""

    def poll(self, _: float) -> Any:
        """Return the next record, or the end that the leader knows."""
        answer = self._answers.pop(0)
        self._known = max(self._known, answer.offset() + (answer.error() is None))
        return answer

    def close(self) -> None:
        """Do nothing."""


def test_a_leader_that_knows_an_earlier_end_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The high watermark goes back when a partition's leader changes: the older marker would publish all again."""
    monkeypatch.setattr(markers, "Consumer", Brokers)
    found = markers.newest_marker({"socket.timeout.ms": 1000}, "topic", SLOT)
    assert found.marker is not None
    assert found.marker.checkpoint.id == 1
