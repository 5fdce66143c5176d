"""Names the package that a sink needs and that is not installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needed_for(sink: str, module: str, package: str) -> Iterator[None]:
    """
    Import a sink's modules within this block: if its package is missing, the error says what to install, and where.

    The package is named as its own project calls it: this project's name belongs to others on the package index.

    Raises:
        ModuleNotFoundError: The module cannot be found; others pass as they are.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise ModuleNotFoundError(
            f"{sink} needs the package {package}; install it for the driver and on every executor host: "
            f"pip install '{package}'",
            name=module,
        ) from error
