"""A body of several buffers, as read by boto3."""

from __future__ import annotations

import io

import pytest

from storage.s3_body import PIECE_BYTES, BufferedBody

BUFFERS = [b"one", b"", b"two", b"three"]
WHOLE = b"onetwothree"


def body_of(*buffers: bytes) -> BufferedBody:
    """Return a body of these buffers."""
    return BufferedBody([memoryview(buffer) for buffer in buffers])


def pieces_of(body: BufferedBody, size: int) -> list[bytes]:
    """Read to the end, like the sender of a body."""
    pieces = []
    while piece := body.read(size):
        pieces.append(bytes(piece))
    return pieces


@pytest.mark.parametrize("position", range(len(WHOLE) + 1))
def test_rest_is_read_from_any_position(position: int) -> None:
    """After a seek, the bytes from there on are read in order, piece by piece or at once."""
    body = body_of(*BUFFERS)
    body.seek(position)
    assert b"".join(pieces_of(body, 2)) == WHOLE[position:]
    body.seek(position)
    assert body.read() == WHOLE[position:]


def test_read_copies_nothing() -> None:
    """A piece is a view of the buffer itself."""
    piece = body_of(*BUFFERS).read(100)
    assert isinstance(piece, memoryview)
    assert piece.obj is BUFFERS[0]


def test_pieces_are_large() -> None:
    """A reader that asks for little gets a whole piece, and none larger than the limit."""
    body = body_of(b"x" * (2 * PIECE_BYTES + 1))
    assert [len(piece) for piece in pieces_of(body, 16_384)] == [PIECE_BYTES, PIECE_BYTES, 1]


def test_length_is_found_by_seeking() -> None:
    """Size and position are found as in a file."""
    body = body_of(*BUFFERS)
    assert (body.seek(0, io.SEEK_END), body.tell(), len(body)) == (len(WHOLE),) * 3
    body.seek(0)
    body.read(1)
    assert body.seek(1, io.SEEK_CUR) == len(BUFFERS[0]) + 1


def test_empty_body_ends_at_once() -> None:
    """A body without bytes is at its end."""
    assert body_of().read(10) == b""
