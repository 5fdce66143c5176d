"""
Hooks of `tools.fuzz_api` for Schemathesis.

Half of the valid job names become that of the job that exists, so that requests get further than "there is no job".
No request leads the service to an address outside of this machine.
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
    """Change what is valid into something else that is valid."""
    job = (case.path_parameters or {}).get("job")
    if isinstance(job, str) and len(job) % 2 and re.fullmatch(NAME_PATTERN, job):
        case.path_parameters["job"] = JOB
    case.body = _harmless(case.body)


def _harmless(value: Any) -> Any:
    """Put an address where nobody answers in the place of every valid one."""
    if isinstance(value, dict):
        return {
            name: _NOBODY
            if name == "service_url" and isinstance(item, str) and re.fullmatch(URL_PATTERN, item)
            else _harmless(item)
            for name, item in value.items()
        }
    return [_harmless(item) for item in value] if isinstance(value, list) else value
