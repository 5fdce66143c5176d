"""Explains a package that is missing because the project was installed without the extras that it needs."""

from __future__ import annotations

_OWN = ("storage", "dstl_service", "backend_client")


def explained(error: ModuleNotFoundError) -> str | None:
    """Return what is missing and how to install it; None if it is a part of the project itself."""
    name = (error.name or "").partition(".")[0]
    if not name or name in _OWN:
        return None
    return (
        f"the package {name} is missing: this project was installed without its extras, or into another environment. "
        "Install it with them, from a checkout as '.[service,spark]' or from its wheel as 'FILE.whl[service,spark]'"
    )
