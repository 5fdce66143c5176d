"""What all routes share: how they get the service, and the names that paths may carry."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Path, Request

from dstl_service.service import ChangelogService
from storage.model import NUMBER_MAX

NAME_PATTERN = r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}$"


def get_service(request: Request) -> ChangelogService:
    """Return the application's service."""
    service: ChangelogService = request.app.state.service
    return service


Service = Annotated[ChangelogService, Depends(get_service)]
JobName = Annotated[str, Path(pattern=NAME_PATTERN, description="Name of the job.")]
CheckpointId = Annotated[int, Path(ge=0, le=NUMBER_MAX, description="Checkpoint id: Spark's batch id.")]
