"""Which table: of a job, an operator and a range of key groups."""

from __future__ import annotations

from dataclasses import dataclass

from storage.key_groups import KeyGroupRange


@dataclass(frozen=True, slots=True)
class TableId:
    """Identity of a table."""

    job: str
    operator: str
    key_groups: KeyGroupRange

    @property
    def names(self) -> dict[str, str]:
        """Return its parts for log entries and errors."""
        return {"job": self.job, "operator": self.operator, "key_groups": self.key_groups.to_text()}
