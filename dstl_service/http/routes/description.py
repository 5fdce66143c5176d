"""Adds access to the OpenAPI document: every route but the open paths needs a token."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from dstl_service.access.rights import PUBLIC_PATHS


def describe_access(app: FastAPI) -> None:
    """Add the token to the OpenAPI document; `AccessMiddleware` checks it, which is faster than FastAPI would."""
    make = app.openapi

    def document() -> dict[str, Any]:
        made = make()
        made.setdefault("components", {})["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        made["security"] = [{"token": []}]
        for path in PUBLIC_PATHS:
            for operation in made["paths"][path].values():
                operation["security"] = []
        return made

    app.openapi = document  # type: ignore[method-assign]  # FastAPI's documented way of extending the document
