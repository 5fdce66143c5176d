"""
Decides which host runs a partition and, with standbys, which other host keeps a copy of its table.

1. A partition stays where it is as long as its host is there. If that is lost, it moves to the keeper of its copy, or
   without one to where Spark has run it since.
2. A keeper stays, too. A lost one is replaced by the host with the fewest copies of that partition's host, so that the
   partitions of a lost host are spread over all others.
3. A host that joins, or returns, first gets its share of the copies. When these are complete it takes
   over partitions whose copies it holds until load is balanced; their former hosts then keep the copies.
4. Without standbys such a host takes over partitions whose tables were prepared there, those first that it had before.

Load is the number of partitions per core. No I/O.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Executor(NamedTuple):
    """An executor: its id, its host's name, and the number of its cores."""

    id: str
    host: str
    cores: int


@dataclass(frozen=True, slots=True)
class Seats:
    """
    The places of all partitions of one count.

    Args:
        runners: The host that runs each partition.
        keepers: The host that keeps the copy of its table; None without standbys, or if there is no second host.
    """

    runners: tuple[str, ...]
    keepers: tuple[str | None, ...]


@dataclass(frozen=True, slots=True)
class Takeover:
    """
    Partitions that hosts with less than their share take over.

    Args:
        before: The places at present.
        after: The places then.
    """

    before: Seats
    after: Seats

    @property
    def partitions(self) -> list[int]:
        """The numbers of these partitions."""
        runners = zip(self.before.runners, self.after.runners, strict=True)
        return [partition for partition, (old, new) in enumerate(runners) if old != new]

    def applied(self, seats: Seats) -> Seats:
        """Return places after it; a partition that has moved since it was decided stays."""
        pairs = zip(seats.runners, self.before.runners, self.after.runners, strict=True)
        return Seats(tuple(new if now == old else now for now, old, new in pairs), seats.keepers)


def seated(
    partitions: int,
    cores: Mapping[str, int],
    before: Seats | None,
    ready: Collection[str] = (),
    ran: Mapping[int, str] | None = None,
    *,
    keeps_copies: bool = True,
) -> Seats:
    """
    Return the places of partitions.

    Args:
        partitions: Their number.
        cores: The number of cores of each host that is there; at least one.
        before: Where they were; None at first.
        ready: Hosts whose copies are complete and recent.
        ran: The host on which each partition has run last, as far as known.
        keeps_copies: Whether there are standbys.
    """
    old = before if before is not None else Seats((), ())
    former = [*old.runners, *[""] * (partitions - len(old.runners))]
    kept = [*old.keepers, *[None] * (partitions - len(old.keepers))]
    runners = _runners(former, kept, ran or {}, cores)
    if not keeps_copies:
        return Seats(tuple(runners), (None,) * partitions)
    keepers = _keepers(runners, [keeper if keeper in cores else None for keeper in kept], sorted(cores))
    if before is not None:
        for host in sorted(set(ready) & cores.keys()):
            for partition in _takeovers(host, runners, [at for at, one in enumerate(keepers) if one == host], cores):
                runners[partition], keepers[partition] = host, runners[partition]
    return Seats(tuple(runners), tuple(keepers))


def takeover(seats: Seats, cores: Mapping[str, int], homes: Mapping[int, str]) -> Takeover | None:
    """
    Return what each host with less than its share should take over, without copies; None for nothing.

    Args:
        seats: The present places, all on hosts that are there.
        cores: The number of cores of each host.
        homes: A host that has run a partition before, and may still have its table.
    """
    runners, load, share = list(seats.runners), Counter(seats.runners), _shares(len(seats.runners), cores)
    for host in sorted(host for host in cores if load[host] < share[host]):
        others = [partition for partition, runner in enumerate(runners) if runner != host]
        others.sort(key=lambda partition: homes.get(partition) != host)  # stable
        for partition in _takeovers(host, runners, others, cores):
            runners[partition] = host
    after = Seats(tuple(runners), seats.keepers)
    return None if after == seats else Takeover(seats, after)


def _runners(
    former: Sequence[str], kept: Sequence[str | None], ran: Mapping[int, str], cores: Mapping[str, int]
) -> list[str]:
    known = ((host, keeper, ran.get(at)) for at, (host, keeper) in enumerate(zip(former, kept, strict=True)))
    found = [next((host for host in hosts if host in cores), None) for hosts in known]
    load = Counter(host for host in found if host is not None)
    runners = []
    for host in found:
        runner = host if host is not None else min(cores, key=lambda one: ((load[one] + 1) / cores[one], one))
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


def _shares(partitions: int, cores: Mapping[str, int]) -> dict[str, int]:
    """Return how many partitions each host should run at least."""
    total = sum(cores.values())
    return {host: partitions * count // total for host, count in cores.items()}


def _takeovers(host: str, runners: Sequence[str], candidates: Sequence[int], cores: Mapping[str, int]) -> list[int]:
    """Return which candidates a host takes over until it has its share, from hosts that have more than theirs."""
    share = _shares(len(runners), cores)
    load, taken = Counter(runners), list[int]()
    left: dict[str, list[int]] = {}
    for partition in reversed(candidates):
        left.setdefault(runners[partition], []).append(partition)
    while load[host] < share[host] and left:
        fullest = max(left, key=lambda one: (load[one] / cores[one], -left[one][-1]))
        if load[fullest] <= share[fullest]:
            break
        taken.append(left[fullest].pop())
        load[fullest] -= 1
        load[host] += 1
        if not left[fullest]:
            del left[fullest]
    return taken


def locations(seats: Seats, executors: Sequence[Executor]) -> list[list[tuple[str | None, str]]]:
    """
    Return the places at which each partition's task should run, the best one first.

    Args:
        seats: The partitions' hosts.
        executors: All executors.

    Returns:
        For each partition pairs of executor and host; None instead of an executor: any one of that host.
    """
    found, turn = [], Counter[str]()
    by_host: dict[str, list[str]] = {}
    for executor in executors:
        by_host.setdefault(executor.host, []).append(executor.id)
    for runner, keeper in zip(seats.runners, seats.keepers, strict=True):
        here = by_host.get(runner)
        places: list[tuple[str | None, str]] = []
        if here:
            places.append((here[turn[runner] % len(here)], runner))
            turn[runner] += 1
        if keeper is not None:
            places.append((None, keeper))
        found.append(places)
    return found
