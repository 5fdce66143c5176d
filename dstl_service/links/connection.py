"""
One link: a connection on which each side sends requests and answers those of the other.

Both sides send a heartbeat every half second. A side that hears nothing for three of its own heartbeats ends the
connection. It counts its heartbeats instead of the time, so that a process that was paused itself does not blame its
peer. Owned by the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from dstl_service.links.frames import FRAME_BYTES_MAX, FrameDecoder, FrameError, Message, encode_frame
from dstl_service.links.room import LinkRoom
from storage.errors import DstlError, InternalError, OverloadedError, error_from_dict

HEARTBEAT_S = 0.5
SILENT_HEARTBEATS_MAX = 3
_ANSWERS_AT_ONCE, _UNREAD_ANSWERS_MAX = 256, 512
_READ_BYTES = 1 << 18
_LARGE_BYTES = 1 << 16
"""A larger frame takes long enough to decode that other jobs would wait."""

logger = logging.getLogger("dstl_service")

Answer = Callable[[Message], Awaitable[Message]]
"""Answers a request of the other side; a `DstlError` is sent there."""


class LinkEndedError(Exception):
    """The connection ended before the answer came; the request may have been carried out."""


class LinkStreams(NamedTuple):
    """
    Both directions of a connection.

    Args:
        reader: Its input.
        writer: Its output.
        decoder: May hold bytes that came after the introduction.
    """

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    decoder: FrameDecoder


class LinkConnection:
    """
    One side of a link, after both sides have introduced themselves.

    Args:
        streams: The connection; ended at the end.
        answer: Answers the other side's requests.
        room: Memory for what the other sides of all links send.
        job: The link's job.
    """

    def __init__(self, streams: LinkStreams, answer: Answer, room: LinkRoom, job: str) -> None:
        self._reader, self._writer, self._decoder = streams
        self._answer = answer
        self._room = room
        self._job = job
        self._incomplete_bytes = 0
        self._peer = str(streams.writer.get_extra_info("peername"))
        self._waiting: dict[int, asyncio.Future[Message]] = {}
        self._answering: set[asyncio.Task[None]] = set()
        self._number = 0
        self._silent = 0
        self._is_waiting = False
        self._has_ended = False
        self.is_silent = False
        """Whether it ended because nothing came from the other side, which may be cut off or hang."""

    async def run(self) -> None:
        """Serve the connection until it ends, for whatever reason; then fail the requests that wait."""
        self._decoder.bytes_max = FRAME_BYTES_MAX
        heartbeats = asyncio.get_running_loop().create_task(self._send_heartbeats())
        try:
            await self._read()
        except (OSError, FrameError) as error:
            logger.info("a link ended", extra={"peer": self._peer, "error": repr(error)})
        finally:
            heartbeats.cancel()
            self.end()
            self._hold_incomplete(0)
            with suppress(OSError, asyncio.CancelledError):
                await heartbeats

    async def request(self, body: Message) -> Message:
        """
        Send a request and return its answer.

        Raises:
            LinkEndedError: The connection ended.
            DstlError: The other side's error.
        """
        if self._has_ended:
            raise LinkEndedError
        self._number += 1
        number = self._number
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            await self._send({"id": number, "request": body})
            answer: Message = await future
        except OSError as error:
            raise LinkEndedError from error
        finally:
            del self._waiting[number]
        return answer

    def end(self) -> None:
        """End the connection at once."""
        self._has_ended = True
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(LinkEndedError())
        for task in self._answering:
            task.cancel()
        self._writer.transport.abort()

    async def _read(self) -> None:
        while True:
            while (message := await self._next()) is not None:
                self._hold_incomplete(self._decoder.buffered_bytes)
                self._take(message)
            self._hold_incomplete(self._decoder.buffered_bytes)
            piece = await self._reader.read(_READ_BYTES)
            if not piece:
                return
            self._silent = 0
            self._decoder.feed(piece)

    async def _next(self) -> Message | None:
        if self._decoder.complete_bytes <= _LARGE_BYTES:
            return self._decoder.next()
        self._is_waiting = True
        try:
            async with self._room.turn(self._job):
                return self._decoder.next()
        finally:
            self._is_waiting, self._silent = False, 0

    def _hold_incomplete(self, size_bytes: int) -> None:
        """Hold this much of the room for the incomplete frame, instead of what was held for it before."""
        more = size_bytes - self._incomplete_bytes
        if more > 0 and not self._room.take(self._job, more):
            raise FrameError("too many bytes are arriving on the links of this job")
        if more < 0:
            self._room.give_back(self._job, -more)
        self._incomplete_bytes = size_bytes

    def _take(self, message: Message) -> None:
        number = message.get("id")
        if not isinstance(number, int):
            return  # a heartbeat
        if isinstance(request := message.get("request"), dict):
            if len(self._answering) >= _UNREAD_ANSWERS_MAX:
                raise FrameError("the other side reads no answers")
            cost_bytes = self._decoder.cost_bytes
            is_held = self._room.take(self._job, cost_bytes)
            task = asyncio.get_running_loop().create_task(self._serve(number, request if is_held else None))
            self._answering.add(task)
            task.add_done_callback(partial(self._answered, cost_bytes if is_held else 0))
            return
        future = self._waiting.get(number)
        if future is None or future.done():
            return
        if isinstance(answer := message.get("answer"), dict):
            future.set_result(answer)
        else:
            future.set_exception(_error_in(message))

    def _answered(self, held_bytes: int, task: asyncio.Task[None]) -> None:
        self._answering.discard(task)
        self._room.give_back(self._job, held_bytes)

    async def _serve(self, number: int, request: Message | None) -> None:
        """Answer a request; refuse it if there was no room for it."""
        message: Message
        try:
            if request is None:
                raise OverloadedError("requests of this job on links take too much memory; ask again")
            if len(self._answering) > _ANSWERS_AT_ONCE:
                raise OverloadedError(f"more than {_ANSWERS_AT_ONCE} requests on one link at a time; ask again")
            message = {"id": number, "answer": await self._answer(request)}
        except DstlError as error:
            message = {"id": number, "error": error.to_dict()}
        except Exception:
            logger.exception("a request on a link failed")
            message = {"id": number, "error": InternalError("the request failed; see the service's log").to_dict()}
        with suppress(OSError):  # the reader notices the end, too
            await self._send(message)

    async def _send(self, message: Message) -> None:
        self._writer.write(encode_frame(message))
        await self._writer.drain()

    async def _send_heartbeats(self) -> None:
        while True:
            if not self._is_waiting:  # else this side does not read
                self._silent += 1
            if self._silent > SILENT_HEARTBEATS_MAX:
                break
            if not self._writer.transport.get_write_buffer_size():  # else its bytes are the heartbeat
                self._writer.write(encode_frame({}))
            await asyncio.sleep(HEARTBEAT_S)
        logger.warning("a link is silent", extra={"peer": self._peer, "heartbeats": SILENT_HEARTBEATS_MAX})
        self.is_silent = True
        self.end()


def _error_in(message: Message) -> DstlError:
    try:
        return error_from_dict(message["error"])
    except (ValueError, LookupError, TypeError, AttributeError):
        return InternalError("the other side of the link sent an unreadable answer")


async def read_message(reader: asyncio.StreamReader, decoder: FrameDecoder) -> Message:
    """
    Return the next message of a connection that is not served yet.

    Raises:
        FrameError: The other side sent something else, or ended the connection.
    """
    while (message := decoder.next()) is None:
        piece = await reader.read(_READ_BYTES)
        if not piece:
            raise FrameError("the connection ended")
        decoder.feed(piece)
    return message
