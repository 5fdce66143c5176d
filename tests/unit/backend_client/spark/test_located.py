"""Executors that are given up; Spark's part is played."""

from __future__ import annotations

import threading
from typing import Any
from unittest.mock import MagicMock

import pytest

from backend_client.spark.private import located


@pytest.mark.parametrize("hangs", [True, False])
def test_executor_is_given_up_without_its_cluster_manager(monkeypatch: pytest.MonkeyPatch, hangs: bool) -> None:
    """A manager that was cut off together with the host, or fails, does not delay what Spark's driver can do alone."""
    context, answers, calls = MagicMock(), threading.Event(), list[str]()

    def kill(executor: str) -> None:
        calls.append(f"kill {executor}")
        if hangs:
            answers.wait(60)
        raise RuntimeError("no answer within 120 s")

    context.killAndReplaceExecutor = kill
    context.schedulerBackend.return_value.removeExecutor = lambda executor, _: calls.append(f"remove {executor}")
    monkeypatch.setattr(located, "java_session", lambda _: MagicMock(sparkContext=lambda: context))
    monkeypatch.setattr(located, "jvm_of", lambda _: MagicMock())
    spark: Any = None
    removing = threading.Thread(target=located.remove_executor, args=(spark, "7", "it is silent"), daemon=True)
    removing.start()
    removing.join(30)

    assert calls == ["kill 7", "remove 7"]
    answers.set()
