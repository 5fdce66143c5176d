"""The OpenAPI document, from which clients in other languages are generated, equals the file beside this test."""

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
    """No code change alters the document unintentionally; an intended change rewrites the file."""
    assert made() == DOCUMENT.read_text(encoding="utf-8")
