"""`make bench-scale`: costs follow from counts, manifests from encoding, latencies from the slowest host."""

from __future__ import annotations

import pytest

from dstl_service.uploads.settings import UploadSettings
from loadtest.bench_scale.__main__ import measure
from loadtest.bench_scale.cost import DAY_S, file_per_partition, shared_objects
from loadtest.bench_scale.latency import checkpoint_latencies_ms
from loadtest.bench_scale.manifests import hosts_of, manifest_sizes
from tools.servers.faults.store_profiles import Latency, StoreProfile


def test_objects_are_shared_by_host() -> None:
    """A checkpoint costs an object per host and a manifest, whatever the number of partitions of a host."""
    few, many = (shared_objects(partitions, 1.0, 1.0, 1.0) for partitions in (51, 100))

    assert hosts_of(51) == hosts_of(100) == 2
    assert many.puts - few.puts < 0.01 * DAY_S * 49
    assert file_per_partition(100, 1.0).puts - file_per_partition(51, 1.0).puts == DAY_S * 49


def test_price_follows_from_requests() -> None:
    """A million PUTs cost five dollars."""
    assert file_per_partition(1, DAY_S / 1_000_000, 0).dollars == pytest.approx(5)


def test_manifests_grow_with_partitions() -> None:
    """A delta names one set of each partition; a complete manifest the log of twenty checkpoints, too."""
    small, large = manifest_sizes(50), manifest_sizes(100)

    assert 1.8 < large.delta / small.delta < 2.2
    assert 15 < small.complete / small.delta < 25
    assert small.delta < small.mean < small.complete


def test_slowest_host_decides() -> None:
    """A checkpoint of many hosts is as late as the last of them, and the manifest comes after it."""
    profile = StoreProfile(small=Latency({50: 30, 99: 150}))
    one, many = (
        sum(checkpoint_latencies_ms(profile, hosts, 1_000, 1_000, 200, 7, UploadSettings())) / 200 for hosts in (1, 32)
    )

    assert 60 < one < 100
    assert many > 1.3 * one


def test_figures_of_a_size() -> None:
    """Each size has its figures, and the counted objects decide the price."""
    cheap, dear = ({figure.name: figure.value for figure in measure(stored, short=True)} for stored in (2.0, 3.0))

    name = "200 partitions on 4 hosts: PUTs a day at a batch a second"
    assert dear[name] - cheap[name] == pytest.approx(4 * DAY_S / 1e6)  # type: ignore[operator]
