"""A store of a profile: a real S3 server behind the fault proxy, which draws each request's latency."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from tools.servers.faults.proxy import FaultProxy, Rule
from tools.servers.s3_server import S3Server

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

pytestmark = pytest.mark.integration

BUCKET = "profiles"


@pytest.fixture(scope="module")
def bucket(s3_server: S3Server) -> str:
    s3_server.create_bucket(BUCKET)
    return BUCKET


@pytest.fixture
def proxied(s3_server: S3Server, fault_proxy: FaultProxy, bucket: str) -> Iterator[S3Client]:
    """Return a client that goes through the proxy and repeats nothing; the profile is that of the store as it is."""
    session = boto3.session.Session(s3_server.access_key, s3_server.secret_key, region_name=s3_server.region)
    config = Config(retries={"total_max_attempts": 1}, max_pool_connections=20)
    client = session.client("s3", endpoint_url=fault_proxy.endpoint_url, config=config)
    yield client
    client.close()
    fault_proxy.set_store("local", 0)


def took_ms(client: S3Client, key: str, body: bytes) -> float:
    began_s = time.perf_counter()
    client.put_object(Bucket=BUCKET, Key=key, Body=body)
    return (time.perf_counter() - began_s) * 1000


def test_each_request_takes_what_was_drawn(fault_proxy: FaultProxy, proxied: S3Client) -> None:
    """Requests that share connections each take their own drawn latency, small and large ones from their own line."""
    fault_proxy.set_store("s3-standard", 5)
    small_ms = [took_ms(proxied, "small", b"x" * 1_000) for _ in range(12)]
    large_ms = [took_ms(proxied, "large", os.urandom(100_000)) for _ in range(3)]

    drawn = fault_proxy.store.drawn()
    assert (drawn.requests, drawn.refused, drawn.reset, drawn.out) == (15, 0, 0, 0)
    assert {name: len(values) for name, values in drawn.latencies_ms.items()} == {"small": 12, "large": 3}
    for measured_ms, drawn_ms in (
        (small_ms, drawn.latencies_ms["small"]),
        (large_ms, drawn.latencies_ms["large"]),
    ):
        # The proxy's own time comes on top, which a busy machine makes longer.
        assert all(found >= wanted * 0.95 for found, wanted in zip(measured_ms, drawn_ms, strict=True))
        assert min(found - wanted for found, wanted in zip(measured_ms, drawn_ms, strict=True)) < 300
    assert len(set(drawn.latencies_ms["small"])) == 12


def test_requests_wait_at_the_same_time(fault_proxy: FaultProxy, proxied: S3Client) -> None:
    """Latencies of requests that run at once overlap."""
    fault_proxy.set_store("s3-standard", 1)
    with ThreadPoolExecutor(8) as pool:
        began_s = time.perf_counter()
        list(pool.map(lambda n: took_ms(proxied, f"part-{n}", b"x" * 100_000), range(16)))
        elapsed_s = time.perf_counter() - began_s

    assert elapsed_s < sum(fault_proxy.store.drawn().latencies_ms["large"]) / 1000 * 0.75


def test_lossy_store_refuses_and_resets(fault_proxy: FaultProxy, proxied: S3Client) -> None:
    """A lossy store's 503s and resets reach the client, as many as were drawn; all other objects are stored."""
    fault_proxy.set_store("lossy", 2)

    def put(number: int) -> str:
        try:
            proxied.put_object(Bucket=BUCKET, Key=f"lossy-{number}", Body=b"x")
        except ClientError as error:
            return error.response["Error"]["Code"]
        except BotoCoreError:
            return "reset"
        return ""

    with ThreadPoolExecutor(8) as pool:
        outcomes = list(pool.map(put, range(400)))

    drawn = fault_proxy.store.drawn()
    assert drawn.refused == outcomes.count("SlowDown") == 3
    assert drawn.reset == outcomes.count("reset") == 3  # one of them after the store had acted
    assert outcomes.count("") == 400 - drawn.refused - drawn.reset


def test_outage_lasts_until_it_is_ended(fault_proxy: FaultProxy, proxied: S3Client) -> None:
    """During an outage that another process begins, all requests get a 503, at once."""
    fault_proxy.store.set_out(is_out=True)
    with pytest.raises(ClientError, match="SlowDown"):
        proxied.list_objects_v2(Bucket=BUCKET)
    fault_proxy.store.set_out(is_out=False)

    proxied.list_objects_v2(Bucket=BUCKET)
    assert fault_proxy.store.drawn().out == 1


def test_rule_comes_first(fault_proxy: FaultProxy, proxied: S3Client) -> None:
    """A request that a rule has ended draws nothing."""
    fault_proxy.set_store("same-zone", 0)
    fault_proxy.set_rules(Rule("refuse", times=1), Rule("drop", times=1))
    with pytest.raises(ClientError, match="SlowDown"):
        took_ms(proxied, "refused", b"x")
    with pytest.raises(BotoCoreError):
        took_ms(proxied, "dropped", b"x")

    assert fault_proxy.store.drawn().requests == 0
    assert took_ms(proxied, "stored", b"x") > 0
    assert fault_proxy.store.drawn().requests == 1
