"""What a service's refusal says: the error in it, and when to ask again."""

from __future__ import annotations

import http.client
import json

from storage.errors import DstlError, InternalError, UnauthorizedError, error_from_dict

_RETRY_AFTER_MAX_S = 60
_SHOWN_BYTES = 200


def retry_after_s(response: http.client.HTTPResponse) -> int:
    """Return the service's retry-after in seconds, capped; 0 if it is missing or not in seconds."""
    text = response.getheader("retry-after", "")
    return min(int(text), _RETRY_AFTER_MAX_S) if text.isascii() and text.isdigit() else 0


def error_of(response: http.client.HTTPResponse, address: str) -> DstlError:
    """Return the error of an answer that is one; the remedies that only the client knows are added."""
    data = response.read()
    try:
        error = error_from_dict(json.loads(data))
    except (ValueError, AttributeError):
        return InternalError(
            f"{address} answered {response.status} as no changelog service does: {data[:_SHOWN_BYTES]!r}; check the "
            "address, and proxies before it"
        )
    if response.status == http.client.UNAUTHORIZED:
        return UnauthorizedError(
            f"{address} asks for a token, and was sent none or a wrong one: {error.message}; set token_file, "
            "DSTL_TOKEN_FILE or DSTL_TOKEN on every host",
            **error.context,
        )
    return error
