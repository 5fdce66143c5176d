"""The log writer of one task."""

from __future__ import annotations

import random
from typing import Any

import pytest

from backend_client.service.client import ServiceClient
from backend_client.service.log_writer import LogWriter
from dstl_service.wire import ChangeSetRef, LogTarget
from storage.change_set import decode_change_set
from storage.checksum import checksum64
from storage.errors import OverloadedError
from storage.key_groups import KeyGroupRange

TARGET = LogTarget("job", "op", 5, 2, 77, 3, KeyGroupRange(10, 19))


class MemoryClient(ServiceClient):
    """A service that receives sets and makes them durable, in memory; refuses where it is told to."""

    def __init__(self) -> None:
        super().__init__("http://nowhere")
        self.sets: list[tuple[int, bytes, bool]] = []
        self.persisted: list[list[int]] = []
        self.is_full = False

    def append(
        self, target: LogTarget, sqn: int, payload: bytes, checksum: int, count: int, *, preemptive: bool
    ) -> ChangeSetRef:
        """Receive a set."""
        if self.is_full:
            raise OverloadedError("full")
        assert checksum == checksum64(payload)
        assert count == len(list(decode_change_set(payload, "sent")))
        self.sets.append((sqn, payload, preemptive))
        return ChangeSetRef(
            "op", target.checkpoint_id, target.epoch, target.attempt, target.partition, sqn, len(payload), "s"
        )

    def persist(self, job: str, epoch: int, refs: list[ChangeSetRef], *, wait: bool = True) -> list[dict[str, Any]]:
        """Make sets durable."""
        self.persisted.append([ref.sqn for ref in refs])
        return [{"handle": ref.sqn} for ref in refs]


@pytest.fixture
def client() -> MemoryClient:
    """Return a service without sets."""
    return MemoryClient()


def writer_of(client: MemoryClient) -> LogWriter:
    """Return a writer that sends to this service."""
    return LogWriter(client, TARGET)


def test_sets_get_rising_numbers(client: MemoryClient) -> None:
    """Each sealed set has the next sequence number, and its reference is kept in order."""
    writer = writer_of(client)
    writer.append({b"a": b"1", b"b": None}, preemptive=True)
    writer.append({b"c": b"2"}, preemptive=False)

    assert [(sqn, preemptive) for sqn, _, preemptive in client.sets] == [(0, True), (1, False)]
    assert [ref.sqn for ref in writer.refs] == [0, 1]
    assert writer.changes == 3


def test_second_pass_goes_on_with_the_numbers_of_the_first(client: MemoryClient) -> None:
    """I2: sets that continue those of another attempt are distinguished from those of a concurrent attempt."""
    writer = LogWriter(client, TARGET, first_sqn=2)
    for value in (b"1", b"2"):
        writer.append({b"a": value}, preemptive=True)
    writer.make_durable()

    assert [ref.sqn for ref in writer.refs] == [2, 3]
    assert client.persisted == [[2, 3]]


def test_large_set_is_divided(client: MemoryClient) -> None:
    """I9: what one key has written is sent in sets that a service can hold; only a single change may be larger."""
    chance = random.Random(1)
    changes: dict[bytes, bytes | None] = {b"%02d" % at: chance.randbytes(3 << 20) for at in range(20)}
    changes |= {b"large": chance.randbytes(20 << 20), b"gone": None}
    writer = writer_of(client)
    writer.append(changes, preemptive=False)

    sent = [dict(decode_change_set(payload, "sent")) for _, payload, _ in client.sets]
    assert {key: bytes(value) if value else None for part in sent for key, value in part.items()} == changes
    assert sum(map(len, sent)) == len(changes) == writer.changes
    assert [sqn for sqn, _, _ in client.sets] == [ref.sqn for ref in writer.refs] == list(range(len(sent)))
    assert all(
        len(payload) <= 16 << 20 or len(part) == 1 for (_, payload, _), part in zip(client.sets, sent, strict=True)
    )
    assert all(preemptive for _, _, preemptive in client.sets)


def test_empty_set_is_not_sent(client: MemoryClient) -> None:
    """A task without changes sends nothing and uses no number."""
    writer = writer_of(client)
    writer.append({}, preemptive=False)

    assert (writer.refs, client.sets) == ([], [])


def test_refused_set_keeps_its_number(client: MemoryClient) -> None:
    """I8: a refused set is not counted, so sending it again gives it the same number."""
    writer = writer_of(client)
    client.is_full = True
    with pytest.raises(OverloadedError):
        writer.append({b"a": b"1"}, preemptive=False)
    client.is_full = False
    writer.append({b"a": b"1"}, preemptive=False)

    assert [sqn for sqn, _, _ in client.sets] == [0]
    assert writer.changes == 1


def test_durable_sets_carry_handles(client: MemoryClient) -> None:
    """I5: after the wait, every reference has the handle of its own set."""
    writer = writer_of(client)
    for key in (b"a", b"b"):
        writer.append({key: b"1"}, preemptive=False)
    writer.make_durable()

    assert [ref.handle for ref in writer.refs] == [{"handle": 0}, {"handle": 1}]


def test_only_new_sets_are_made_durable(client: MemoryClient) -> None:
    """Sets that already have a handle are not requested again."""
    writer = writer_of(client)
    writer.make_durable()
    for key in (b"a", b"b"):
        writer.append({key: b"1"}, preemptive=False)
        writer.make_durable()

    assert client.persisted == [[0], [1]]
    assert [ref.handle for ref in writer.refs] == [{"handle": 0}, {"handle": 1}]
