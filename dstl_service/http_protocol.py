"""Bounds what may be sent before a request is known: uvicorn's fast parser itself has no limit for headers."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_BYTES_MAX = 64 * 1024
"""The longest request line with all headers; what the socket delivers at once may come on top."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """HTTP/1.1 as uvicorn speaks it; a request whose head does not end within HEAD_BYTES_MAX is refused and cut off."""

    _head_is_open = True
    _head_bytes = 0

    def on_message_begin(self) -> None:
        self._head_is_open = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._head_is_open = False
        self._head_bytes = 0
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._head_is_open:
            return
        self._head_bytes += len(data)
        if self._head_bytes > HEAD_BYTES_MAX and not self.transport.is_closing():
            self.send_400_response(f"The head of a request has at most {HEAD_BYTES_MAX} bytes.")
