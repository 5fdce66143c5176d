"""The program ``dstl``: runs `dstl_service.cli`, or says which package its installation lacks."""

from __future__ import annotations

import sys

from storage.missing_packages import explained


def main() -> int:
    """Run the command; return its exit code."""
    try:
        from dstl_service import cli
    except ModuleNotFoundError as error:
        if (text := explained(error)) is None:
            raise
        sys.stderr.write(f"dstl: {text}\n")
        return 2
    return cli.main()
