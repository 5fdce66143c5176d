"""The demo's view of its programs."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.merchant_orders.trial.processes import DemoError, Program, last_batch
from tests.waiting import wait_until


@pytest.mark.parametrize(
    ("names", "expected"), [([], -1), (["0"], 0), (["9", "10", ".10.crc", ".11.tmp"], 10), ([".0.crc"], -1)]
)
def test_newest_batch_is_that_of_the_largest_number(tmp_path: Path, names: list[str], expected: int) -> None:
    """Batches are files whose names are numbers; Spark's temporary files do not count."""
    assert last_batch(tmp_path) == -1
    (tmp_path / "commits").mkdir()
    for name in names:
        (tmp_path / "commits" / name).touch()

    assert last_batch(tmp_path) == expected


def test_program_that_ends_by_itself_is_an_error(tmp_path: Path) -> None:
    """The error has the exit code and the end of the log, whenever it is noticed."""
    program = Program("no_such_module", [], tmp_path)
    program.start()
    wait_until(lambda: not is_running(program), what="the end of the program")

    for step in (program.check, program.finish, program.wait):
        with pytest.raises(DemoError, match=r"(?s)no_such_module ended with exit code 1.*No module named"):
            step()
    program.kill()  # which it may be told in any state


def is_running(program: Program) -> bool:
    try:
        program.check()
    except DemoError:
        return False
    return True
