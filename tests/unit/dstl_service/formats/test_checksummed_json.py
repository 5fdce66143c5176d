"""JSON documents with a leading checksum."""

from __future__ import annotations

import json

import pytest

from dstl_service.formats.checksummed_json import seal, unseal
from storage.checksum import checksum64
from storage.errors import NewerFormatError

DOCUMENT = {"format": 1, "name": "ü", "list": [1, None]}


def test_form_is_that_of_stored_objects() -> None:
    """The stored form is one compact JSON document with the checksum of the inner one."""
    body = b'{"format":1,"name":"\\u00fc","list":[1,null]}'

    assert seal("thing", DOCUMENT) == b'{"checksum":"%016x","thing":%s}' % (checksum64(body), body)


@pytest.mark.parametrize("ensure_ascii", [True, False])
def test_sealed_document_is_read_back(ensure_ascii: bool) -> None:
    """A document is read back unchanged, and any JSON reader can read it."""
    sealed = seal("thing", DOCUMENT, ensure_ascii=ensure_ascii)

    assert unseal("thing", sealed, 1, "key") == DOCUMENT
    assert json.loads(sealed)["thing"] == DOCUMENT


def test_every_damage_is_found() -> None:
    """I10: a flipped bit, a cut end and another name are all refused."""
    sealed = seal("thing", DOCUMENT)
    damaged = [bytes([*sealed[:at], sealed[at] ^ 1, *sealed[at + 1 :]]) for at in range(len(sealed))]
    damaged += [sealed[:size] for size in range(len(sealed))]

    for data in (*damaged, sealed + b" ", seal("other", DOCUMENT)):
        with pytest.raises(ValueError):
            unseal("thing", data, 1, "key")


def test_newer_format_is_not_called_damage() -> None:
    """The error says which newer version wrote the object and what to do; a flipped bit is damage."""
    newer = seal("thing", {**DOCUMENT, "format": 2})

    with pytest.raises(NewerFormatError, match=r"thing a/b was written by a newer version .* Use the newer version"):
        unseal("thing", newer, 1, "a/b")
    with pytest.raises(ValueError):
        unseal("thing", newer.replace(b'"format":2', b'"format":3'), 1, "a/b")
