"""Frames of links: decoded from any pieces, and refused when they are too large or not JSON objects."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dstl_service.links.frames import FRAME_BYTES_MAX, HELLO_BYTES_MAX, FrameDecoder, FrameError, Message, encode_frame
from dstl_service.wire import JSON_VALUES_MAX

MESSAGES = st.lists(st.dictionaries(st.text(max_size=5), st.one_of(st.integers(), st.text(), st.none())), max_size=5)


@given(MESSAGES, st.integers(1, 50))
def test_messages_come_out_of_any_pieces(messages: list[Message], size: int) -> None:
    """Frames that are cut anywhere, or come together, give the messages in order."""
    data = b"".join(map(encode_frame, messages))
    decoder, found = FrameDecoder(FRAME_BYTES_MAX), []
    for start in range(0, len(data), size):
        decoder.feed(data[start : start + size])
        while (message := decoder.next()) is not None:
            found.append(message)

    assert found == messages
    assert decoder.next() is None


@pytest.mark.parametrize(
    "data",
    [
        (HELLO_BYTES_MAX + 1).to_bytes(4, "big"),
        b"\xff\xff\xff\xff",
        b"GET / HTTP/1.1\r\n",
        b"\0\0\0\0",
        b"\0\0\0\2[]",
        b"\0\0\0\1{",
        b"\0\0\0\2\xff\xff",
        len(deep := b'{"a":' * 1_600).to_bytes(4, "big") + deep,
    ],
)
def test_anything_else_is_refused(data: bytes) -> None:
    """A length above the limit is refused before its content arrives."""
    decoder = FrameDecoder()
    decoder.feed(data)

    with pytest.raises(FrameError):
        decoder.next()


def test_frame_of_too_many_values_is_not_parsed() -> None:
    """Short values take a hundred times their size in memory, and the event loop waits while they are parsed."""
    body = b'{"x":[' + b"[]," * (JSON_VALUES_MAX // 2) + b"[]]}"
    decoder = FrameDecoder(FRAME_BYTES_MAX)
    decoder.feed(len(body).to_bytes(4, "big") + body)

    with pytest.raises(FrameError, match="values"):
        decoder.next()
