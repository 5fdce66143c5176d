"""The order of tests: long ones first, in each process."""

from __future__ import annotations

from collections import Counter

from tests.support.order import dealt

COSTS = {"chaos": 3000.0, "model": 900.0, "job": 300.0, "server": 60.0}


def cost_s(test: str) -> float:
    return COSTS.get(test.partition("-")[0], 0.0)


def module(test: str) -> str:
    return test.partition("-")[0]


def test_each_part_begins_with_long_tests() -> None:
    """Long tests are dealt one by one, modules whole; short tests come last, and parts end where xdist cuts them."""
    tests = [
        *(f"short{number}-{test}" for number in range(4) for test in range(3)),
        *("server-0", "server-1", "job-0", "job-1", "chaos-0", "model-0", "model-1"),
    ]

    order = dealt(tests, cost_s, module, 2)

    assert order[:3] == ["chaos-0", "model-1", "server-0"]
    half = order.index("model-0")
    assert order[half : half + 3] == ["model-0", "job-0", "job-1"]
    assert half == len(order) // 2
    assert Counter(order) == Counter(tests)


def test_last_process_has_tests_that_wait_first() -> None:
    """Beside modules that compute, which cost more, another process runs modules that wait; long tests are first."""
    costs = {"chaos": 3000.0, "model": 900.0, "job": 300.0, "other job": 240.0, "server": 60.0, "other server": 60.0}
    tests = [f"{name}-0" for name in (*costs, "short")]

    order = dealt(tests, lambda test: costs.get(module(test), 0.0), module, 2)

    assert order == [
        *("chaos-0", "job-0", "server-0"),
        *("model-0", "other server-0", "other job-0", "short-0"),
    ]


def test_one_process_begins_with_long_tests() -> None:
    """In one process the longest test is first, and equal ones keep their order."""
    tests = ["short-1", "job-1", "short-0", "model-0", "job-0", "chaos-0"]

    assert dealt(tests, cost_s, module, 1) == ["chaos-0", "model-0", "job-1", "job-0", "short-1", "short-0"]
