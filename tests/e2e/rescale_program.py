"""
Rescales an operator on a cluster of two executors while its query runs, and checks its output and state.

``python -m tests.e2e.rescale_program --folder FOLDER``; an error means that a key's rows were lost, doubled or computed
without its state.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from itertools import groupby
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from backend_client import ChangelogStateBackend
from dstl_service.cli import main as dstl
from storage.errors import InvalidInputError
from storage.key_groups import key_group_range
from tests.e2e.local_cluster import run_on_cluster
from tests.e2e.support import (
    OUTPUT,
    Collected,
    Totals,
    expected_output,
    expected_state,
    random_input,
    read_input,
    stored_totals,
    write_input,
)
from tests.waiting import wait_until

FILES = random_input(seed=70, batches=200, rows=60, keys=30)
KEY_GROUPS = 128


class Observed(Collected):
    """Collects each batch's rows and the operators' parallelism."""

    def __init__(self, backend: ChangelogStateBackend) -> None:
        super().__init__()
        self.backend = backend
        self.seen: list[dict[str, int]] = []

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        super().__call__(batch, batch_id)
        self.seen.append(self.backend.parallelism())


def run(spark: SparkSession, folder: Path, local_dir: Path) -> None:
    """Run the query with 2, 3, 1 and again 2 partitions, without a stop; an administrator asks for 1."""
    (folder / "in").mkdir()
    backend = ChangelogStateBackend(
        f"file://{folder / 'store'}",
        job="job",
        local_dir=str(local_dir),
        parallelism=2,
        max_parallelism=KEY_GROUPS,
        patience_s=30,
    )
    collected = Observed(backend)
    stream = read_input(spark, folder / "in")
    result = backend.transform_with_state(stream.groupBy("k"), Totals(), OUTPUT, "Update", "None")
    query = result.writeStream.option("checkpointLocation", str(folder / "chk")).foreachBatch(collected).start()
    written = 0

    def is_after_batch_with(parallelism: int) -> bool:
        """Let another batch run; return whether it had this parallelism."""
        nonlocal written
        written += 1
        write_input(folder / "in", FILES[:written])
        query.processAllAvailable()
        return collected.seen[-1] == {"Totals": parallelism}

    def are_tables_there(parallelism: int) -> bool:
        """Return whether the tables of all partitions have been made."""
        ranges = [key_group_range(at, parallelism, KEY_GROUPS) for at in range(parallelism)]
        return all(any(local_dir.glob(f"tables/*/Totals/{key_groups.to_text()}")) for key_groups in ranges)

    def switches(parallelism: int) -> bool:
        """Let another batch run; after one as before, leave the cores to the tables' preparation for a moment."""
        if is_after_batch_with(parallelism):
            return True
        with suppress(AssertionError):  # an administrator's request has not arrived yet
            wait_until(partial(are_tables_there, parallelism), timeout_s=2)
        return False

    assert is_after_batch_with(2)
    command = ["rescale", "--storage", backend.settings.storage, "job", "Totals"]
    for parallelism in (3, 1, 2):
        if parallelism == 1:
            assert dstl([*command, "1"]) == 0
        else:
            backend.rescale("Totals", parallelism)
        wait_until(partial(switches, parallelism), timeout_s=120, what=f"a batch with {parallelism} partitions")
    assert is_after_batch_with(2)
    for operator, number, reason in (("Other", 2, "running operators: Totals"), ("Totals", 10**6, "within 1")):
        assert reason in refusal(backend, operator, number)
    query.stop()
    assert "running operators: none" in refusal(backend, "Totals", 3)

    assert collected.batches == expected_output(FILES[:written])
    assert stored_totals(backend.settings.storage, "job") == expected_state(FILES[:written])
    assert [number for number, _ in groupby(seen["Totals"] for seen in collected.seen)] == [2, 3, 1, 2]


def refusal(backend: ChangelogStateBackend, operator: str, parallelism: int) -> str:
    """Return why a request is refused."""
    try:
        backend.rescale(operator, parallelism)
    except InvalidInputError as error:
        return str(error)
    raise AssertionError("the request was accepted")


if __name__ == "__main__":
    run_on_cluster(run, 1, {"spark.shuffle.reduceLocality.enabled": "false"})
