"""The settings of uploads. Values only."""

from __future__ import annotations

from dataclasses import dataclass

from storage.errors import InvalidInputError
from storage.retry_policy import RetryPolicy


@dataclass(frozen=True, slots=True)
class UploadSettings(RetryPolicy):
    """Uploads of batches: attempts that may overlap (I6), and concurrency."""

    threads: int = 5
    """Uploads of one job that run at the same time; over all jobs at most twice as many run."""
    hedge_share_max: float = 0.12
    """Early second attempts per upload, at most: an attempt that takes longer than nine in ten of its size is joined by
    another one, which makes checkpoints steadier and costs up to this share more PUTs. 0 makes none."""

    def __post_init__(self) -> None:
        RetryPolicy.__post_init__(self)  # `super()` does not know a class with slots
        if self.threads < 1:
            raise InvalidInputError(f"threads must be at least 1, it is {self.threads}")
        if not 0 <= self.hedge_share_max <= 1:
            raise InvalidInputError(f"hedge_share_max must be from 0 to 1, it is {self.hedge_share_max}")
