"""Readable progress of batches: one updating line on a terminal, one line per batch elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from storage.errors import InvalidInputError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

    from backend_client.progress import BatchProgress


class ProgressLine:
    """
    Shows the newest batch of each job; a listener for ``on_progress``.

    Args:
        console: Where to print; the terminal's stderr by default.

    Raises:
        InvalidInputError: The package rich is not installed.
    """

    def __init__(self, console: Console | None = None) -> None:
        try:
            from rich.console import Console as RichConsole
            from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
        except ImportError as error:
            raise InvalidInputError("a progress line needs the package rich: pip install rich") from error
        self._console = console or RichConsole(stderr=True)
        self._lines = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
        )
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, progress: BatchProgress) -> None:
        """Show a batch."""
        if not self._console.is_terminal:
            self._console.print(progress.to_text(), highlight=False, markup=False, soft_wrap=True)
            return
        if not self._tasks:
            self._lines.start()
        if progress.job not in self._tasks:
            self._tasks[progress.job] = self._lines.add_task("", total=None)
        self._lines.update(self._tasks[progress.job], description=progress.to_text())

    def close(self) -> None:
        """Restore the terminal. Idempotent."""
        if self._tasks:
            self._lines.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
