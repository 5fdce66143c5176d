"""Which host runs a partition and which one keeps its copy, when hosts come and go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from hypothesis import given
from hypothesis import strategies as st

from backend_client.spark.places.seats import Executor, Seats, locations, seated, takeover

HOSTS = {"a": 2, "b": 2, "c": 2}
"""Each host's cores."""
TWO = {"a": 2, "b": 2}
ONE = {"a": 2}


def check(seats: Seats, hosts: Collection[str]) -> None:
    """Check what always holds: all places are on hosts that are there, and no copy is beside its table."""
    assert set(seats.runners) <= set(hosts)
    assert all(keeper is None or (keeper in hosts and keeper != runner) for runner, keeper in pairs(seats))
    assert (None in seats.keepers) == (len(set(hosts)) == 1)


def pairs(seats: Seats) -> list[tuple[str, str | None]]:
    """Return runner and keeper of each partition."""
    return list(zip(seats.runners, seats.keepers, strict=True))


def spread(places: tuple[str | None, ...]) -> int:
    """Return by how much the numbers of places differ between hosts that have any."""
    counts = Counter(places).values()
    return max(counts) - min(counts)


def test_load_and_copies_are_spread() -> None:
    """At first, hosts run and keep equally many, and the copies of a host's tables are spread over all others."""
    seats = seated(12, HOSTS, None)

    check(seats, HOSTS)
    assert spread(seats.runners) == spread(seats.keepers) == 0
    assert set(Counter(pairs(seats)).values()) == {2}


def test_same_hosts_get_the_same_places() -> None:
    """A restarted driver, which knows no places, decides as before, so tables on disks are found again."""
    assert seated(7, dict(reversed(HOSTS.items())), None) == seated(7, HOSTS, None)
    assert seated(7, HOSTS, seated(7, HOSTS, None)) == seated(7, HOSTS, None)


def test_lost_partitions_go_on_at_their_copies() -> None:
    """The partitions of a lost host run where their copies are; the others stay, and lost copies get new keepers."""
    before = seated(12, HOSTS, None)
    others = {"b": 2, "c": 2}
    after = seated(12, others, before)

    check(after, others)
    for (runner, keeper), now in zip(pairs(before), after.runners, strict=True):
        assert now == (keeper if runner == "a" else runner)


def test_one_host_keeps_no_copies() -> None:
    """With a single host there is nowhere to keep copies; a second one gets all of them."""
    alone = seated(4, ONE, None)
    assert pairs(alone) == [("a", None)] * 4

    assert pairs(seated(4, TWO, alone)) == [("a", "b")] * 4


def test_host_that_has_come_takes_over_when_its_copies_are_complete() -> None:
    """A new host only keeps copies until they are complete; then it gets its share, from hosts that have more."""
    before = seated(12, TWO, None)
    come = seated(12, HOSTS, before)
    assert come.runners == before.runners
    assert Counter(come.keepers) == {"a": 4, "b": 4, "c": 4}

    after = seated(12, HOSTS, come, ready={"c"})

    check(after, HOSTS)
    assert Counter(after.runners) == {"a": 4, "b": 4, "c": 4}
    moved = [at for at in range(12) if after.runners[at] != come.runners[at]]
    assert all(come.keepers[at] == "c" for at in moved)


@given(
    partitions=st.integers(1, 40),
    steps=st.lists(
        st.tuples(st.lists(st.sampled_from("abcdef"), min_size=1), st.sets(st.sampled_from("abcdef"))),
        min_size=1,
        max_size=8,
    ),
)
def test_places_are_valid_whatever_comes_and_goes(partitions: int, steps: list[tuple[list[str], set[str]]]) -> None:
    """A partition moves only from a lost host, to its copy, or to a ready host that keeps its copy."""
    seats: Seats | None = None
    for hosts, ready in steps:
        now = seated(partitions, dict.fromkeys(hosts, 1), seats, ready)
        check(now, hosts)
        if seats is not None:
            for (runner, keeper), moved_to in zip(pairs(seats), now.runners, strict=True):
                stays = moved_to == runner
                is_lost = runner not in hosts and (moved_to == keeper or keeper not in hosts)
                assert stays or is_lost or moved_to in ready
        seats = now


def test_locations_name_the_executor_first_and_the_copy_second() -> None:
    """A host's partitions are spread over its executors; the copy's place is any executor of its host."""
    seats = Seats(("a", "a", "b"), ("b", None, "a"))
    executors = [Executor("1", "a", 1), Executor("2", "a", 1), Executor("3", "b", 1)]

    assert locations(seats, executors) == [[("1", "a"), (None, "b")], [("2", "a")], [("3", "b"), (None, "a")]]
    assert locations(seats, executors[2:])[0] == [(None, "b")]


def test_load_is_by_core() -> None:
    """A host with more cores runs more partitions, from the start and after it has come."""
    cores = {"a": 2, "b": 6}
    assert Counter(seated(8, cores, None, keeps_copies=False).runners) == {"a": 2, "b": 6}

    come = takeover(seated(8, {"a": 2}, None, keeps_copies=False), cores, {})

    assert come is not None
    assert Counter(come.after.runners) == {"a": 2, "b": 6}
    assert len(come.partitions) == 6


@given(
    partitions=st.integers(1, 40),
    steps=st.lists(st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 4), min_size=1), min_size=1, max_size=8),
    homes=st.dictionaries(st.integers(0, 39), st.sampled_from("abcdef")),
)
def test_places_without_copies_are_valid_whatever_comes_and_goes(
    partitions: int, steps: list[Mapping[str, int]], homes: dict[int, str]
) -> None:
    """Only lost partitions move at once; hosts take over until each has its share, and then nothing more."""
    seats: Seats | None = None
    for cores in steps:
        now = seated(partitions, cores, seats, keeps_copies=False)
        assert set(now.runners) <= cores.keys()
        if seats is not None:
            assert all(new == old for old, new in zip(seats.runners, now.runners, strict=True) if old in cores)
        taken = takeover(now, cores, homes)
        seats = now if taken is None else taken.after
        load, total = Counter(seats.runners), sum(cores.values())
        assert all(load[host] >= partitions * count // total for host, count in cores.items())
        assert takeover(seats, cores, homes) is None
