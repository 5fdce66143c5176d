"""
Decides which host runs a partition and which other host keeps a copy of its table.

1. A partition stays where it is as long as its host is there. If that is lost, it goes on at the keeper of its copy.
2. A keeper stays, too. A lost one is replaced by the host with the fewest copies of that partition's host, so that the
   partitions of a lost host go on at all others.
3. A host that has come, or come back, first gets its share of the copies. When these are complete it takes
   over partitions whose copies it holds until load is balanced; their former hosts then keep the copies.

No I/O.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Seats:
    """
    The places of all partitions of one count.

    Args:
        runners: The host that runs each partition.
        keepers: The host that keeps the copy of its table; None if there is no second host.
    """

    runners: tuple[str, ...]
    keepers: tuple[str | None, ...]

    @property
    def idle(self) -> frozenset[str]:
        """The hosts that keep copies and run no partition."""
        return frozenset(host for host in self.keepers if host is not None) - set(self.runners)


def seated(partitions: int, hosts: Sequence[str], before: Seats | None, ready: Collection[str] = ()) -> Seats:
    """
    Return the places of partitions.

    Args:
        partitions: Their number.
        hosts: The hosts that are there; at least one.
        before: Where they were; None at first.
        ready: Hosts whose copies are complete and recent.
    """
    alive = sorted(set(hosts))
    old = before if before is not None else Seats((), ())
    former = [*old.runners, *[""] * (partitions - len(old.runners))]
    kept = [*old.keepers, *[None] * (partitions - len(old.keepers))]
    runners = _runners(former, kept, alive)
    keepers = _keepers(runners, [keeper if keeper in alive else None for keeper in kept], alive)
    if before is not None:
        _balance(runners, keepers, [host for host in alive if host in ready], len(runners) // len(alive))
    return Seats(tuple(runners), tuple(keepers))


def _runners(former: Sequence[str], kept: Sequence[str | None], alive: Sequence[str]) -> list[str]:
    found = [
        host if host in alive else keeper if keeper in alive else None
        for host, keeper in zip(former, kept, strict=True)
    ]
    load = Counter(host for host in found if host is not None)
    runners = []
    for host in found:
        runner = host if host is not None else min(alive, key=lambda one: (load[one], one))
        load[runner] += host is None
        runners.append(runner)
    return runners


def _keepers(runners: Sequence[str], kept: Sequence[str | None], alive: Sequence[str]) -> list[str | None]:
    keepers = [None if keeper == runner else keeper for keeper, runner in zip(kept, runners, strict=True)]
    if len(alive) < 2:
        return keepers
    pairs = Counter(pair for pair in zip(runners, keepers, strict=True) if pair[1] is not None)
    load = Counter(keeper for keeper in keepers if keeper is not None)
    for partition, runner in enumerate(runners):
        if keepers[partition] is None:
            others = [host for host in alive if host != runner]
            chosen = min(others, key=lambda host: (pairs[runner, host], load[host], host))
            keepers[partition] = chosen
            pairs[runner, chosen] += 1
            load[chosen] += 1
    _spread(runners, keepers, alive, load)
    return keepers


def _spread(runners: Sequence[str], keepers: list[str | None], alive: Sequence[str], load: Counter[str]) -> None:
    """Move copies from the host with the most to the one with the fewest, until no two differ by more than one."""
    while True:
        most, least = max(alive, key=lambda host: load[host]), min(alive, key=lambda host: load[host])
        if load[most] - load[least] < 2:
            return
        movable = [at for at, keeper in enumerate(keepers) if keeper == most and runners[at] != least]
        if not movable:
            return
        keepers[movable[-1]] = least
        load[most] -= 1
        load[least] += 1


def _balance(runners: list[str], keepers: list[str | None], ready: Sequence[str], share: int) -> None:
    """Have ready hosts take over partitions until each has its share, from hosts that have more than theirs."""
    load = Counter(runners)
    for host in ready:
        mine = [partition for partition, keeper in enumerate(keepers) if keeper == host]
        while load[host] < share and mine:
            partition = max(mine, key=lambda one: (load[runners[one]], -one))
            if load[runners[partition]] <= share:
                break
            mine.remove(partition)
            load[runners[partition]] -= 1
            load[host] += 1
            runners[partition], keepers[partition] = host, runners[partition]


def locations(seats: Seats, executors: Sequence[tuple[str, str]]) -> list[list[tuple[str | None, str]]]:
    """
    Return the places at which each partition's task should run, the best one first.

    Args:
        seats: The partitions' hosts.
        executors: Executor id and host of all executors.

    Returns:
        For each partition pairs of executor and host; None instead of an executor: any one of that host.
    """
    found, turn = [], Counter[str]()
    for runner, keeper in zip(seats.runners, seats.keepers, strict=True):
        here = [executor for executor, host in executors if host == runner]
        places: list[tuple[str | None, str]] = []
        if here:
            places.append((here[turn[runner] % len(here)], runner))
            turn[runner] += 1
        if keeper is not None:
            places.append((None, keeper))
        found.append(places)
    return found
