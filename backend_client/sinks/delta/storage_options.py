"""Options of a table's store: its endpoint, and errors that tell none of their values."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from deltalake.exceptions import DeltaError

from backend_client.sinks.option_values import without_values
from storage.errors import InvalidInputError, UnavailableError
from storage.validation import is_endpoint

_ENDPOINT_NAMES = ("aws_endpoint_url_s3", "aws_endpoint_url", "endpoint_url", "aws_endpoint", "endpoint")
_ENCRYPTIONS = ("AES256", "aws:kms", "aws:kms:dsse")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_TOLD = frozenset((*_ENDPOINT_NAMES, "aws_region", "aws_default_region", "region"))
"""Options whose values are names and places."""


def endpoint_of(options: Mapping[str, str]) -> str | None:
    """
    Return the endpoint that the options or the environment name, None if they name none.

    Raises:
        InvalidInputError: One of them is no endpoint, or has credentials: the library would quote it in its errors.
    """
    given = _by_name(options)
    own = [(f"{name} of storage_options", given.get(name)) for name in _ENDPOINT_NAMES]
    around = [(f"{name.upper()} in the environment", os.environ.get(name.upper())) for name in _ENDPOINT_NAMES]
    # What is found first is given to the library, which then looks at none of the later ones: they may be of another
    # program, as `ENDPOINT` is.
    places = [[(name, value) for name, value in place if value] for place in (own, around[:2], around[2:])]
    found = next(filter(None, places), [])
    for name, value in found:
        if not is_endpoint(value):
            raise InvalidInputError(
                f"{name} must be http(s)://host:port, without credentials and query: give keys in the environment of "
                "the executors, or as aws_access_key_id and aws_secret_access_key"
            )
    return None if found == places[2] else found[0][1]  # the library finds the last ones itself


def encryption_of(options: Mapping[str, str]) -> dict[str, str]:
    """Return the options of `open_store` that encrypt as the library does: a bucket's policy may refuse other puts."""
    given = {**_by_name(os.environ), **_by_name(options)}
    mode, key = given.get("aws_server_side_encryption", ""), given.get("aws_sse_kms_key_id")
    if mode not in _ENCRYPTIONS:
        return {}
    return {"sse": mode, **({"sse_kms_key_id": key} if key and mode != "AES256" else {})}


@contextmanager
def told(path: str, options: Mapping[str, str]) -> Iterator[None]:
    """Turn errors of the library into those of the protocol, without previews of rows and values of options."""
    try:
        yield
    except (DeltaError, OSError) as error:
        full_text = without_values(str(error), options, is_told=lambda name: name.lower() in _TOLD)
        text = " ".join(_COLOURS.sub("", full_text).partition("\nPreview")[0].split())
        cause = error if full_text == str(error) else type(error)(full_text)  # tracebacks show it, too
        raise UnavailableError(f"table {path} cannot be read or written: {text[:500]}") from cause


def _by_name(options: Mapping[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in options.items()}
