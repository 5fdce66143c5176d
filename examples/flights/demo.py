"""
The demo: runs the flights example, kills it twice in the middle of a batch, compares its output with a batch answer.

The driver (its Python process, its JVM and their workers) gets SIGKILL after a third of the batches and is restarted.
After two thirds the sidecar gets SIGKILL; the job recovers by itself. At the end every output row must equal the answer
of `examples.flights.answer`. Spark's own log times the kills: a batch runs while ``offsets/N`` exists and ``commits/N``
does not.

Exit codes: 0 identical output; 1 different output, or, with ``--strict`` (STRICT=1), a missed goal; 2 the run failed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from examples.flights.answer import answer, differences
from examples.flights.data import prepare, read_flights, read_weather
from examples.flights.files import RouteFiles, read_lines
from examples.flights.job import ENGINES
from examples.flights.processes import DemoError, DriverProcess, Layout, running_batch, sidecar_pid, stop_sidecar
from examples.flights.report import DemoRun, Kill, figures_of, read_checkpoint_figures, write_html
from tools.reporting.figures import Figure, format_number
from tools.reporting.target import TargetReport, is_set

RESTARTS_MAX = 3
KILL_TRIES_MAX = 3
_POLL_S = 0.01


class Display:
    """A progress bar on a terminal, plain lines elsewhere."""

    def __init__(self, console: Console, batches: int) -> None:
        self._console = console
        self._batches = batches
        self._shown = 0
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
        )
        self._task = self._bar.add_task("batches", total=batches)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._bar.stop()

    def show(self, finished: int) -> None:
        """Show how many batches have finished."""
        if finished == self._shown:
            return
        self._shown = finished
        if self._console.is_terminal:
            self._bar.update(self._task, completed=finished)
        else:
            self._console.print(f"batch {finished} of {self._batches}")

    def note(self, text: str) -> None:
        """Print a line beside the progress."""
        self._console.print(text, highlight=False)


class Demo:
    """One run: the job, its kills and its observed progress."""

    def __init__(self, layout: Layout, run: DemoRun, display: Display, timeout_s: float) -> None:
        self._layout = layout
        self._run = run
        self._display = display
        self._deadline_s = time.monotonic() + timeout_s
        self._driver = DriverProcess(layout, run.engine)

    def play(self) -> None:
        """
        Run the job to its end.

        Raises:
            DemoError: The timeout is over, or the driver fails repeatedly.
        """
        try:
            self._driver.start()
            self._kill_driver(self._run.batches // 3)
            if self._run.engine == "changelog":
                self._kill_sidecar(self._run.batches * 2 // 3)
            self._wait(lambda: self._driver.exit_code() == 0)
            self._run.ended_s = time.time()
        finally:
            self._driver.kill()

    def _kill_driver(self, after_batch: int) -> None:
        """Kill the driver in the middle of a batch and wait until it has resumed."""
        for _ in range(KILL_TRIES_MAX):
            batch_id = self._wait_for_middle_of_batch(after_batch)
            if batch_id is None:
                return
            self._driver.kill()
            killed_s = time.time()
            in_batch = running_batch(self._layout.checkpoint) == batch_id
            self._driver.start()
            if in_batch:
                self._watch_resume(Kill("driver", batch_id, killed_s))
                return
            after_batch = batch_id + 1  # the batch had just finished: try the next one

    def _kill_sidecar(self, after_batch: int) -> None:
        """Kill the sidecar in the middle of a batch and wait until the job continues."""
        batch_id = self._wait_for_middle_of_batch(after_batch)
        pid = sidecar_pid(self._layout)
        if batch_id is None or pid is None:
            self._display.note("no sidecar was running, so none was killed")
            return
        os.kill(pid, signal.SIGKILL)
        kill = Kill("sidecar", batch_id, time.time())
        self._watch_resume(kill)
        if sidecar_pid(self._layout) in (pid, None):
            kill.resumed_s = None  # the kill was not survived
            self._display.note("no other sidecar has started")

    def _watch_resume(self, kill: Kill) -> None:
        self._run.kills.append(kill)
        self._display.note(f"killed the {kill.what} in the middle of batch {kill.batch_id}")
        self._wait(lambda: self._resumed_s(kill) is not None)
        kill.resumed_s = self._resumed_s(kill)
        if kill.resume_s is not None:
            self._display.note(f"the next batch has finished {kill.resume_s:.1f} s after the kill of the {kill.what}")

    def _resumed_s(self, kill: Kill) -> float | None:
        later = [
            float(event["recorded_s"])
            for event in self._run.events
            if event["batch_id"] >= kill.batch_id and event["recorded_s"] > kill.killed_s
        ]
        return min(later, default=None)

    def _wait_for_middle_of_batch(self, after_batch: int) -> int | None:
        """Wait until a batch >= `after_batch` has run for about half of its time; None if the job ends before."""
        while True:
            batch_id = self._wait_for_batch(after_batch)
            if batch_id is None:
                return None
            durations = sorted(event["duration_ms"] for event in self._run.events[-9:])
            time.sleep(durations[len(durations) // 2] / 2000 if durations else 0.1)
            if running_batch(self._layout.checkpoint) == batch_id:
                return batch_id

    def _wait_for_batch(self, after_batch: int) -> int | None:
        found: list[int] = []

        def is_running() -> bool:
            batch_id = running_batch(self._layout.checkpoint)
            if batch_id is not None and batch_id >= after_batch:
                found.append(batch_id)
            return bool(found)

        self._wait(is_running)
        return found[0] if found else None

    def _wait(self, condition: Callable[[], bool]) -> None:
        """Show progress until the condition holds or the job has ended; restart a driver that fails by itself."""
        while True:
            exit_code = self._driver.exit_code()
            self._run.events = read_lines(self._layout.events)
            self._display.show(max((event["batch_id"] + 1 for event in self._run.events), default=0))
            if condition() or exit_code == 0:
                return
            if exit_code is not None:
                self._restart_failed(exit_code)
            if time.monotonic() > self._deadline_s:
                raise DemoError("the run has not ended within --timeout-s")
            time.sleep(_POLL_S)

    def _restart_failed(self, exit_code: int) -> None:
        self._run.unplanned_restarts += 1
        if self._run.unplanned_restarts > RESTARTS_MAX:
            raise DemoError(f"the driver ended with exit code {exit_code}, {RESTARTS_MAX + 1} times")
        self._display.note(f"the driver ended with exit code {exit_code}; restarting it")
        self._driver.start()


def run_demo(options: argparse.Namespace, layout: Layout, console: Console) -> list[Figure]:
    """Prepare the data, play the demo, compare, and write the page; return the figures, first that of differences."""
    console.print("preparing the data and the batch answer")
    flights, weather = read_flights(), read_weather()
    replay = prepare(layout.data, flights, weather, options.files)
    expected = answer(flights, weather)
    run = DemoRun(engine=options.engine, rows=replay.rows, batches=replay.files, started_s=time.time())
    with Display(console, replay.files) as display:
        Demo(layout, run, display, options.timeout_s).play()
    run.checkpoints = read_checkpoint_figures(layout.figures)
    run.output = RouteFiles(layout.output).latest()
    run.differences = differences(expected, run.output)
    figures = figures_of(run)
    write_html(options.reports / "demo.html", run, figures)
    _print_summary(console, figures, run)
    console.print(f"report: {options.reports / 'demo.html'}", soft_wrap=True)
    return figures


def _print_summary(console: Console, figures: Sequence[Figure], run: DemoRun) -> None:
    table = Table(title="Flights demo")
    for name, justify in (("figure", "left"), ("value", "right"), ("unit", "left"), ("goal", "left"), ("", "left")):
        table.add_column(name, justify="right" if justify == "right" else "left")
    for figure in figures:
        mark = {True: "holds", False: "MISSED", None: ""}[figure.holds]
        goal = "" if figure.goal is None else str(figure.goal)
        table.add_row(figure.name, format_number(figure.value), figure.unit, goal, mark)
    console.print(table)
    for text in run.differences[:10]:
        console.print(text, highlight=False)
    console.print("DIFFERENT" if run.differences else f"identical: {len(run.output)} of {len(run.output)} output rows")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the flights example, kill it, resume it, compare it."""
    parser = argparse.ArgumentParser(prog="flights_demo", description=main.__doc__)
    parser.add_argument("--files", type=int, default=24, help="files per stream, one batch each (default %(default)s)")
    parser.add_argument("--reports", type=Path, default=Path("reports"), help="folder of the reports")
    parser.add_argument("--work", type=Path, help="empty folder to work in, kept (default: a temporary one)")
    parser.add_argument(
        "--engine", choices=ENGINES, default="changelog", help="engine that keeps the state (default %(default)s)"
    )
    parser.add_argument("--timeout-s", type=float, default=600, help="give up after this time (default %(default)s)")
    parser.add_argument("--strict", action="store_true", default=is_set("STRICT"))
    options = parser.parse_args(arguments)
    console = Console()
    layout = Layout(options.work or Path(tempfile.mkdtemp(prefix="dstl-demo-")))
    layout.work.mkdir(parents=True, exist_ok=True)
    report = TargetReport("demo", options.reports, strict=options.strict)
    exit_code = 2
    try:
        figures = run_demo(options, layout, console)
        missed = report.write(figures)
        has_differences = figures[0].holds is False
        exit_code = int(has_differences) or missed
    except DemoError as error:
        console.print(f"the demo failed: {error}", soft_wrap=True)
    finally:
        if options.engine == "changelog":
            stop_sidecar(layout)
        if exit_code == 0 and options.work is None:
            shutil.rmtree(layout.work, ignore_errors=True)
        else:
            console.print(f"files and logs of the run: {layout.work}", soft_wrap=True)
    return exit_code


if __name__ == "__main__":
    # When stopped, it must end its driver and sidecar: the exception makes `finally` run.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
