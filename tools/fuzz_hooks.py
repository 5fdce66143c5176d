"""
Hooks of `tools.fuzz_api` for Schemathesis.

Half of the valid job names become that of the existing job, so that requests get past the lookup of the job. No request
leads the service to an address outside this machine.
"""

from __future__ import annotations

import re
from typing import Any

import schemathesis

from dstl_service.wire import NAME_PATTERN, URL_PATTERN

JOB = "known"
_NOBODY = "http://127.0.0.1:1"


@schemathesis.hook
def before_call(_context: Any, case: Any, _kwargs: Any) -> None:
    """Replace valid values by other valid values."""
    job = (case.path_parameters or {}).get("job")
    if isinstance(job, str) and len(job) % 2 and re.fullmatch(NAME_PATTERN, job):
        case.path_parameters["job"] = JOB
    case.body = _harmless(case.body)


def _harmless(value: Any) -> Any:
    """Replace every valid address by one where no server answers."""
    if isinstance(value, dict):
        return {
            name: _NOBODY
            if name == "service_url" and isinstance(item, str) and re.fullmatch(URL_PATTERN, item)
            else _harmless(item)
            for name, item in value.items()
        }
    return [_harmless(item) for item in value] if isinstance(value, list) else value
