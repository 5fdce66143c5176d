"""Spark's JSON schema text, without Spark."""

from __future__ import annotations

import json
from typing import Any


def struct(**fields: Any) -> dict[str, Any]:
    """Return a struct type; each field is nullable."""
    return {
        "type": "struct",
        "fields": [{"name": name, "type": kind, "nullable": True, "metadata": {}} for name, kind in fields.items()],
    }


def array(element: Any) -> dict[str, Any]:
    """Return an array type."""
    return {"type": "array", "elementType": element, "containsNull": True}


def mapping(key: Any, value: Any) -> dict[str, Any]:
    """Return a map type."""
    return {"type": "map", "keyType": key, "valueType": value, "valueContainsNull": True}


def schema(**fields: Any) -> str:
    """Return the JSON text of a struct type."""
    return json.dumps(struct(**fields))
