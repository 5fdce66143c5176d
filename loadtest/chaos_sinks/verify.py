"""Compares the records that a reader saw with those that an undisturbed run would have published. No I/O."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Files = Sequence[Sequence[tuple[str, int]]]
"""The rows (k, v) of each file, or of each batch."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Numbers of records; all are 0 if output was published exactly once."""

    lost: int
    twice: int
    wrong: int
    """Records that an undisturbed run would not have published."""
    parted: int
    """Records whose random number is not the one that the key's state had: output and state of different attempts."""
    out_of_order: int


def batches(files: Files, ends: Iterable[int]) -> Files:
    """
    Return the rows of each batch; files that no batch has read make one more.

    A driver that is killed after Spark's source has listed a file, and before the batch is planned, reads two files in
    the next batch.

    Args:
        files: The files, in the order in which the source lists them.
        ends: The index of each batch's last file, in order.
    """
    found, begin = [], 0
    for end in [*(end + 1 for end in ends), len(files)]:
        if end > begin:
            found.append([row for file in files[begin:end] for row in file])
            begin = end
    return found


def expected(read: Files) -> Counter[tuple[str, int, int]]:
    """Return all records (k, n, s): one per key and batch."""
    totals: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    records: Counter[tuple[str, int, int]] = Counter()
    for batch in read:
        for key, value in batch:
            count, total = totals[key]
            totals[key] = count + 1, total + value
        records.update((key, *totals[key]) for key in {key for key, _ in batch})
    return records


def verdict(read: Files, records: Iterable[Mapping[str, Any]], *, in_order: bool) -> Verdict:
    """Judge the records that a reader saw of these batches, each key's in the order in which it saw them."""
    wanted, found = expected(read), Counter[tuple[str, int, int]]()
    by_key: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for record in records:
        found[record["k"], record["n"], record["s"]] += 1
        by_key[record["k"]].append(record)
    parted = out_of_order = 0
    for of_key in by_key.values():
        numbers = [record["n"] for record in of_key]
        out_of_order += in_order and numbers != sorted(numbers)
        chain = sorted(of_key, key=lambda record: int(record["n"]))
        befores = [0, *(record["now"] for record in chain)]
        parted += sum(record["before"] != before for record, before in zip(chain, befores, strict=False))
    return Verdict(
        lost=sum((wanted - found).values()),
        twice=sum(count - 1 for count in found.values() if count > 1),
        wrong=sum(count for record, count in found.items() if record not in wanted),
        parted=parted,
        out_of_order=out_of_order,
    )
