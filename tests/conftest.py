"""
Settings for every test: Hypothesis's profiles, the order, and the rule that nothing is skipped where CI runs.

HYPOTHESIS_PROFILE chooses a profile by name; without it, `ci` where the variable CI is set, else `default`.
"""

from __future__ import annotations

import functools
import gc
import os
import signal
from collections.abc import Generator
from typing import TypeVar

import botocore.session
import pytest
from hypothesis import HealthCheck, settings

from tests.support.order import LONG_S, dealt
from tools.servers.service.process import ServiceProcess
from tools.servers.spark.classes import ARCHIVE, options_of_short_jvms

# Tests start hundreds of services.
ServiceProcess.is_forked = True

IN_CI = bool(os.environ.get("CI"))

# All processes that tests start inherit this.
os.environ.setdefault("JAVA_TOOL_OPTIONS", options_of_short_jvms(ARCHIVE if ARCHIVE.exists() else None))

# Programs that tests start report missed goals: STRICT=1 around the tests is not meant for them.
for variable in ("STRICT", "SHORT"):
    os.environ.pop(variable, None)

# A process of the suite keeps a gigabyte of modules and tests. With Python's own thresholds, a fifth of its processor
# time goes into looking for garbage among them; short runs of much code, as in the model check, make little garbage.
gc.set_threshold(50_000, 20, 100)

# Each client of S3 would read and parse the descriptions of its API again.
botocore.session.create_loader = functools.cache(botocore.session.create_loader)

# A shell starts background jobs with Ctrl-C ignored, and programs that tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No deadline, and no check of how long drawing takes: both say more about the machine than about the code.
_ANY_MACHINE = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("default", _ANY_MACHINE, max_examples=50, stateful_step_count=30)
# CI repeats itself, so that it judges a change; new examples are drawn on everyone's machine, and by `nightly`.
settings.register_profile("ci", _ANY_MACHINE, max_examples=50, stateful_step_count=40, derandomize=True)
settings.register_profile("nightly", _ANY_MACHINE, max_examples=1000, stateful_step_count=500, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if IN_CI else "default"))

Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)


KINDS_S = {"e2e": 300.0, "spark": 240.0, "integration": 60.0}
"""How long tests with a mark may take, as far as their order is concerned; those without one take milliseconds."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put long tests first, in each process that runs them."""
    processes = int(getattr(config, "workerinput", {}).get("workercount", 1))
    items[:] = dealt(items, _cost_s, lambda item: item.path, processes)


def pytest_collection_finish() -> None:
    """Leave what the tests consist of to no collection."""
    gc.collect()
    gc.freeze()


def _cost_s(item: pytest.Item) -> float:
    limit = item.get_closest_marker("timeout")
    limit_s = float(limit.args[0]) if limit else 0.0
    known = [seconds for kind, seconds in KINDS_S.items() if item.get_closest_marker(kind)]
    return max([*known, limit_s if known or limit_s >= LONG_S else 0.0])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Let a skipped test fail in CI."""
    report = yield
    return _refuse_skip(report)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Let a module that skips itself fail in CI."""
    report = yield
    return _refuse_skip(report)


def _refuse_skip(report: Report) -> Report:
    # An expected failure is reported as skipped too, but it did run.
    if IN_CI and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"{report.nodeid}: no test may be skipped in CI, and this one was. {reason}"
    return report
