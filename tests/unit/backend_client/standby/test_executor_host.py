"""How a Python worker learns the name by which Spark's driver knows its host."""

from __future__ import annotations

import pytest

from backend_client.standby.executor_host import executor_host, host_in

CLASS = b"org.apache.spark.executor.CoarseGrainedExecutorBackend"


@pytest.mark.parametrize(
    ("words", "host"),
    [
        ([b"java", CLASS, b"--executor-id", b"1", b"--hostname", b"10.0.0.7", b"--cores", b"1"], "10.0.0.7"),
        ([b"java", b"x.YarnCoarseGrainedExecutorBackend", b"--hostname", b"node-1"], "node-1"),
        ([b"java", b"x.KubernetesExecutorBackend", b"--hostname", b"[fd00::7]", b""], "[fd00::7]"),
        ([b"java", CLASS, b"--hostname"], None),
        ([b"java", CLASS, b"--hostname", b""], None),
        ([b"other", b"--hostname", b"10.0.0.7"], None),
        ([], None),
    ],
)
def test_host_is_on_the_command_line(words: list[bytes], host: str | None) -> None:
    """Every cluster manager starts executors with the host as an option; other programs do not count."""
    assert host_in(words) == host


def test_other_processes_have_no_executor() -> None:
    """A process that does not descend from an executor gets no name."""
    assert executor_host() is None
