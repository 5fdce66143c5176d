"""Checkpoints on a virtual clock: sharing, hosts, bandwidth and early second attempts have the effect they should."""

from __future__ import annotations

from random import Random

from dstl_service.uploads.settings import UploadSettings
from loadtest.bench_tables.simulation import Layout, own_files, plain_ms, shared_objects, uploaded_ms
from tools.reporting.figures import percentile
from tools.servers.faults.store_profiles import PROFILES, Latency, StoreProfile

_NARROW = StoreProfile(
    small=Latency({50: 1, 99: 1.001}), large=Latency({50: 100, 99: 100.1}), bandwidth_bytes_per_s=1_000_000
)


def _megabyte(_chance: Random) -> list[float]:
    return [1_000_000.0]


def test_subtasks_lie_on_all_hosts() -> None:
    """Fifty subtasks are on thirteen hosts, four on most, and none is lost."""
    layout = Layout("many", 13)
    shared = next(shared_objects(_megabyte, layout, Random(1)))
    own = next(own_files(_megabyte, layout, Random(1)))

    assert [len(objects) for objects in shared] == [1] * 13
    assert [len(objects) for objects in own] == [4] * 11 + [3] * 2
    assert sum(map(sum, shared)) == sum(map(sum, own)) == 50_000_000


def test_many_change_sets_become_several_objects() -> None:
    """As in the service, an object has one batch: 50 MB on one host are five of ten, and no byte is lost."""
    (objects,) = next(shared_objects(_megabyte, Layout("one", 1, 50), Random(1)))

    assert len(objects) == 5
    assert sum(objects) == 50_000_000


def test_bytes_of_a_host_share_its_link() -> None:
    """Four megabytes take four seconds at a megabyte a second, in one object and in four; on four hosts one second."""
    one, four = Layout("one", 1, 4), Layout("four", 4, 4)
    patient = UploadSettings(attempts_max=1, timeout_ms=60_000, hedge_share_max=0)
    took_ms = [
        uploaded_ms(_NARROW, shared_objects(_megabyte, one, Random(1)), 3, patient, 1),
        plain_ms(_NARROW, own_files(_megabyte, one, Random(1)), 3, 1),
        plain_ms(_NARROW, own_files(_megabyte, four, Random(1)), 3, 1),
    ]

    assert [round(ms / 1000) for found in took_ms for ms in found] == [4, 4, 4, 4, 4, 4, 1, 1, 1]


def test_early_attempts_shorten_the_tail() -> None:
    """At a store with a long tail, hedged uploads of the same objects have a shorter one than plain ones."""
    layout = Layout("one", 1, 1)
    hedged = uploaded_ms(
        PROFILES["s3-standard"], shared_objects(_megabyte, layout, Random(1)), 1_000, UploadSettings(), 1
    )
    plain = plain_ms(PROFILES["s3-standard"], own_files(_megabyte, layout, Random(1)), 1_000, 1)

    slow, slower = percentile(hedged, 99.9), percentile(plain, 99.9)
    assert slow is not None
    assert slower is not None
    assert slow < slower / 1.5
