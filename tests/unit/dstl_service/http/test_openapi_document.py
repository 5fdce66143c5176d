"""The OpenAPI document, which clients of other languages are made from, as the file beside this test has it."""

from __future__ import annotations

import json
from pathlib import Path

from dstl_service.app import create_app
from dstl_service.settings import ServiceSettings

DOCUMENT = Path(__file__).with_name("openapi.json")


def made() -> str:
    """Return the document's text, indented so that a difference can be read."""
    document = create_app(ServiceSettings("memory://x")).openapi()
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def test_document_is_as_it_was() -> None:
    """No change of the code changes the document by the way; who means to change it writes the file anew."""
    assert made() == DOCUMENT.read_text(encoding="utf-8")
