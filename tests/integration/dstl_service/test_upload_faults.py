"""
The service on a real S3 server whose network, answers, disk or host fail and recover.

A failure means that an appended set is missing or doubled in a checkpoint, that the service does not recover by itself,
or that some uploads delay others.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

import psutil
import pytest

from dstl_service.wire import ChangeSetRef, CheckpointRef, CompleteResponse
from storage.errors import ConflictError, DstlError, OverloadedError, UnavailableError
from tests.integration.dstl_service.conftest import Serve
from tests.support.machine import Host, RemoteS3Server, small_disk
from tests.waiting import wait_until
from tools.servers.faults.proxy import FaultName, FaultProxy, Rule
from tools.servers.faults.toxiproxy import Direction, Toxiproxy
from tools.servers.s3_server import S3Server
from tools.servers.service.job_driver import JobDriver
from tools.servers.service.process import ServiceProcess

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

OpenJob = Callable[..., JobDriver]
StoredKeys = Callable[[str], list[str]]

SEGMENTS = r"/segments/"
MANIFESTS = r"/checkpoints/0+\."
MIB = 2**20
# Late attempts do not matter here: only errors end them, or there is always another one.
PATIENT = {"DSTL_UPLOAD_TIMEOUT_MS": "60000", "DSTL_UPLOAD_DELAY_AFTER_ERROR_MS": "50"}
HEDGED = {"DSTL_UPLOAD_ATTEMPTS_MAX": "40"}


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """Return threads for requests that wait while the test continues."""
    with ThreadPoolExecutor(16) as made:
        yield made


def append_some(job: JobDriver, size_bytes: int = 1000, count: int = 3) -> tuple[list[bytes], list[ChangeSetRef]]:
    """Append sets of checkpoint 0; return their payloads and references."""
    payloads = [bytes([sqn]) + os.urandom(size_bytes) for sqn in range(count)]
    return payloads, [job.append(payload, sqn) for sqn, payload in enumerate(payloads)]


def failed_uploads(service: ServiceProcess) -> float:
    """Return the number of uploads that the service gave up."""
    return service.metrics()["dstl_upload_failures_total"]


def assert_completed_once(job: JobDriver, ref: CheckpointRef, payloads: list[bytes]) -> None:
    """Check that only this checkpoint exists, and that it holds each set once."""
    listed = job.client.get(f"/v1/jobs/{job.name}/checkpoints")
    assert [CheckpointRef(**item["ref"]) for item in listed] == [ref]
    assert job.payloads(ref) == payloads


class TestNetwork:
    """Toxiproxy between service and store."""

    @pytest.mark.parametrize("direction", ["upstream", "downstream"])
    def test_latency_only_delays(
        self, serve: Serve, open_job: OpenJob, toxiproxy: Toxiproxy, direction: Direction
    ) -> None:
        """With 100 ms of latency in each direction, a checkpoint completes without a failed upload."""
        service = serve(toxiproxy.proxy_url, **HEDGED)
        job = open_job(service)
        payloads, refs = append_some(job)
        with toxiproxy.toxic("latency", direction, latency=100, jitter=50):
            ref = job.complete(refs).ref

        assert_completed_once(job, ref, payloads)
        assert failed_uploads(service) == 0

    def test_narrow_network_gets_batch_through(
        self, serve: Serve, open_job: OpenJob, toxiproxy: Toxiproxy, stored_keys: StoredKeys
    ) -> None:
        """I7: a batch that takes longer than the time-outs of all attempts is durable when the first of them ends."""
        service = serve(toxiproxy.proxy_url, DSTL_UPLOAD_TIMEOUT_MS="300")
        job = open_job(service)
        payloads, refs = append_some(job, MIB, 4)
        with toxiproxy.toxic("bandwidth", "upstream", rate=1500):
            ref = job.complete(refs).ref

        assert_completed_once(job, ref, payloads)
        assert failed_uploads(service) >= 1

    @pytest.mark.parametrize(
        "fault",
        [
            pytest.param(lambda proxy: proxy.toxic("reset_peer", timeout=0), id="reset"),
            pytest.param(lambda proxy: proxy.toxic("timeout", timeout=0), id="silent"),
            pytest.param(lambda proxy: proxy.toxic("timeout", "upstream", timeout=200), id="time-out"),
            pytest.param(lambda proxy: proxy.toxic("limit_data", "upstream", bytes=500), id="cut"),
            pytest.param(lambda proxy: proxy.closed(), id="refused"),
        ],
    )
    def test_checkpoint_outlasts_broken_network(
        self,
        serve: Serve,
        open_job: OpenJob,
        toxiproxy: Toxiproxy,
        pool: ThreadPoolExecutor,
        fault: Callable[[Toxiproxy], AbstractContextManager[None]],
    ) -> None:
        """I7: a checkpoint requested during a broken network completes once the network is back."""
        service = serve(toxiproxy.proxy_url, DSTL_UPLOAD_TIMEOUT_MS="300", DSTL_UPLOAD_DELAY_AFTER_ERROR_MS="50")
        job = open_job(service)
        payloads, refs = append_some(job)
        with pytest.raises(ConflictError):
            job.complete(refs, checkpoint_id=1)  # is answered once the service has checked that the job still exists
        with fault(toxiproxy):
            completed = pool.submit(job.complete, refs)
            wait_until(lambda: failed_uploads(service) >= 1)
            assert not completed.done()

        assert_completed_once(job, completed.result().ref, payloads)


class TestAnswers:
    """mitmproxy between service and store."""

    @pytest.mark.parametrize("status", [503, 429])
    def test_error_of_store_is_outlasted(
        self, serve: Serve, open_job: OpenJob, fault_proxy: FaultProxy, status: int
    ) -> None:
        """I7: an S3 that temporarily answers with errors costs only time."""
        job = open_job(serve(fault_proxy.endpoint_url, DSTL_UPLOAD_DELAY_AFTER_ERROR_MS="50"))
        payloads, refs = append_some(job)
        rules = [Rule("refuse", path=path, status=status, times=n) for path, n in ((SEGMENTS, 4), (MANIFESTS, 3))]
        fault_proxy.set_rules(*rules)

        ref = job.complete(refs).ref

        assert fault_proxy.befallen() == [4, 3]
        assert_completed_once(job, ref, payloads)

    @pytest.mark.parametrize("fault", ["lose_response", "drop"])
    @pytest.mark.parametrize("times", [1, 5])
    def test_unanswered_segment_put_is_success(
        self,
        serve: Serve,
        open_job: OpenJob,
        fault_proxy: FaultProxy,
        stored_keys: StoredKeys,
        fault: FaultName,
        times: int,
    ) -> None:
        """I5, I8: a PUT that is lost, or whose answer is lost, is repeated, and each set exists once."""
        job = open_job(serve(fault_proxy.endpoint_url, **PATIENT))
        payloads, refs = append_some(job)
        fault_proxy.set_rules(Rule(fault, path=SEGMENTS, times=times))

        ref = job.complete(refs).ref

        assert fault_proxy.befallen() == [times]
        assert_completed_once(job, ref, payloads)
        assert len(stored_keys("job/segments")) == 1

    @pytest.mark.parametrize("fault", ["lose_response", "drop"])
    @pytest.mark.parametrize("times", [1, 3])
    def test_unanswered_manifest_put_is_success(
        self,
        serve: Serve,
        open_job: OpenJob,
        fault_proxy: FaultProxy,
        stored_keys: StoredKeys,
        fault: FaultName,
        times: int,
    ) -> None:
        """I3, I5: a conditional PUT whose answer is lost finds its own object, and the checkpoint exists once."""
        job = open_job(serve(fault_proxy.endpoint_url))
        payloads, refs = append_some(job)
        before = stored_keys("job/checkpoints")
        fault_proxy.set_rules(Rule(fault, path=MANIFESTS, times=times))

        ref = job.complete(refs).ref

        assert fault_proxy.befallen() == [times]
        assert_completed_once(job, ref, payloads)
        assert len(stored_keys("job/checkpoints")) == len(before) + 1

    def test_truncated_answer_is_fetched_again(self, serve: Serve, open_job: OpenJob, fault_proxy: FaultProxy) -> None:
        """I10: an object whose bytes break off in transit is fetched again by a service without it in memory."""
        job = open_job(serve(fault_proxy.endpoint_url))
        payloads, refs = append_some(job)
        ref = job.complete(refs).ref
        other = open_job(serve(fault_proxy.endpoint_url))
        fault_proxy.set_rules(Rule("truncate", method="GET", path=SEGMENTS, kept_bytes=100, times=1))

        assert other.payloads(ref) == payloads
        assert fault_proxy.befallen() == [1]

    def test_truncated_answers_are_no_values(self, serve: Serve, open_job: OpenJob, fault_proxy: FaultProxy) -> None:
        """I10: while every answer breaks off, a restore ends with an error and no wrong value; later it works."""
        job = open_job(serve(fault_proxy.endpoint_url))
        payloads, refs = append_some(job)
        ref = job.complete(refs).ref
        other = open_job(serve(fault_proxy.endpoint_url))
        fault_proxy.set_rules(Rule("truncate", method="GET", path=SEGMENTS, kept_bytes=100))

        frames = other.frames(ref)
        assert [header["kind"] for header, _ in frames] == ["plan", "error", "end"]
        assert frames[1][0]["error"]["kind"] == "unavailable"

        fault_proxy.set_rules()
        assert other.payloads(ref) == payloads

    def test_hung_attempts_do_not_starve_others(self, serve: Serve, open_job: OpenJob, fault_proxy: FaultProxy) -> None:
        """I6: uploads that are never answered do not delay other jobs, however many they are."""
        fault_proxy.set_rules(Rule("hang", path="/hung-[0-9]+/segments/"))
        service = serve(fault_proxy.endpoint_url)
        for number in range(10):
            hung = open_job(service, f"hung-{number}")
            hung.client.persist(hung.name, hung.epoch, append_some(hung)[1], wait=False)
        wait_until(lambda: sum(fault_proxy.befallen()) >= 10)
        job = open_job(service)
        payloads, refs = append_some(job)

        ref = job.complete(refs).ref

        assert_completed_once(job, ref, payloads)
        held = service.metrics()["dstl_in_flight_bytes"]
        assert held >= 10 * 3 * 1000

    def test_hung_attempt_is_overtaken(
        self, serve: Serve, open_job: OpenJob, fault_proxy: FaultProxy, stored_keys: StoredKeys
    ) -> None:
        """I6: if two attempts of an upload hang, the third one stores the object under the same key."""
        service = serve(fault_proxy.endpoint_url, **HEDGED)
        job = open_job(service)
        payloads, refs = append_some(job)
        fault_proxy.set_rules(Rule("hang", path=SEGMENTS, times=2))

        ref = job.complete(refs).ref

        assert_completed_once(job, ref, payloads)
        assert failed_uploads(service) == 0
        assert len(stored_keys("job/segments")) == 1

    def test_bug_of_request_is_not_retried(
        self, serve: Serve, open_job: OpenJob, fault_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """An error that a retry cannot fix ends an upload after one attempt; the sets are still kept."""
        monkeypatch.setattr("backend_client.service.client._LAST_TRY_S", 60.0)
        job = open_job(serve(fault_proxy.endpoint_url, **PATIENT))
        payloads, refs = append_some(job)
        fault_proxy.set_rules(Rule("refuse", path=SEGMENTS, status=400, times=1))
        with monkeypatch.context() as patch, pytest.raises(DstlError, match="refused the request"):
            patch.setattr(job.client, "_patience_s", 0.0)
            job.complete(refs)
        assert fault_proxy.befallen() == [1]

        assert_completed_once(job, job.complete(refs).ref, payloads)


class TestMachines:
    """Disks and hosts."""

    def test_full_disk_is_outlasted(self, open_job: OpenJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """I5, I7: on a full disk, sets are reported as not durable, kept, and stored once there is room."""
        with small_disk(tmp_path / "disk", 8 * MIB) as disk:
            filler = disk / "filler"
            with ServiceProcess((disk / "storage").as_uri(), PATIENT) as service:
                job = open_job(service)
                payloads, refs = append_some(job, MIB, 3)
                filler.write_bytes(b"x" * 6 * MIB)
                with monkeypatch.context() as patch, pytest.raises(UnavailableError, match="space"):
                    patch.setattr("backend_client.service.client._LAST_TRY_S", 60.0)
                    patch.setattr(job.client, "_patience_s", 0.0)
                    job.complete(refs)
                objects = list((disk / "storage" / "job" / "segments").rglob("*.seg"))
                filler.unlink()

                ref = job.complete(refs).ref

                assert objects == []
                assert_completed_once(job, ref, payloads)

    def test_host_of_store_is_cut_off(self, open_job: OpenJob, pool: ThreadPoolExecutor) -> None:
        """I7: while the store's host neither answers nor refuses, checkpoints wait; they complete when it is back."""
        with Host() as host, RemoteS3Server(host) as server:
            server.create_bucket("bucket")
            with ServiceProcess("s3://bucket", server.env()) as service:
                job = open_job(service)
                payloads, refs = append_some(job)
                host.cut_off()
                # Completing it may wait before the upload, until it is known that the job was not deleted.
                job.flush(refs)
                completed: Future[CompleteResponse] = pool.submit(job.complete, refs)
                wait_until(lambda: failed_uploads(service) >= 1)
                assert not completed.done()
                host.connect()

                assert_completed_once(job, completed.result().ref, payloads)

    def test_memory_is_bounded_while_store_is_silent(self, open_job: OpenJob, pool: ThreadPoolExecutor) -> None:
        """I9: if the store accepts requests and answers none, a full service refuses, and stays within its limit."""
        limit_bytes = 32 * MIB
        settings = {"DSTL_BATCH_IN_FLIGHT_BYTES_MAX": str(limit_bytes), "DSTL_BATCH_SIZE_BYTES": str(4 * MIB)}
        with S3Server() as server:
            server.create_bucket("bucket")
            with ServiceProcess("s3://bucket", {**server.env(), **settings}) as service:
                jobs = [open_job(service, f"job-{number}", patience_s=5.0) for number in range(4)]
                before_bytes = psutil.Process(service.pid).memory_info().rss
                server.pause()
                try:
                    appending = [pool.submit(append_some, job, MIB, 64) for job in jobs]
                    errors = [future.exception() for future in appending]
                    most_bytes = psutil.Process(service.pid).memory_info().rss
                    metrics = service.metrics()
                finally:
                    server.resume()

        # A client whose patience ends while it waits for room no longer gets the reason.
        assert all(isinstance(error, OverloadedError | UnavailableError) for error in errors)
        assert metrics["dstl_change_sets_refused_total"] >= 1
        assert 0 < metrics["dstl_in_flight_bytes"] <= limit_bytes
        assert most_bytes - before_bytes <= limit_bytes + 50 * MIB

    def test_killed_store_is_outlasted(self, open_job: OpenJob, pool: ThreadPoolExecutor) -> None:
        """I7: an S3 server that dies during a checkpoint and is restarted costs only time."""
        with S3Server() as server:
            server.create_bucket("bucket")
            with ServiceProcess("s3://bucket", server.env()) as service:
                job = open_job(service)
                payloads, refs = append_some(job, MIB, 8)
                server.stop(signal.SIGKILL)
                completed = pool.submit(job.complete, refs)
                wait_until(lambda: failed_uploads(service) >= 1)
                server.start()

                assert_completed_once(job, completed.result().ref, payloads)
