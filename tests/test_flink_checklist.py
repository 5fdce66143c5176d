"""docs/flink-checklist.md omits no scenario of Flink's, names existing tests, and is sorted."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parent
PAGE = (TESTS.parent / "docs/flink-checklist.md").read_text(encoding="utf-8")

FLINK_CLASSES = [
    "BatchingStateChangeUploadSchedulerTest",
    "ChangelogCompatibilityITCase",
    "ChangelogDelegateEmbeddedRocksDBStateBackendTest",
    "ChangelogDelegateHashMapInMemoryTest",
    "ChangelogDelegateHashMapTest",
    "ChangelogDelegateStateTest",
    "ChangelogKeyedStateBackendTest",
    "ChangelogListStateTest",
    "ChangelogLocalRecoveryITCase",
    "ChangelogMapStateTest",
    "ChangelogMetricGroupTest",
    "ChangelogPqStateTest",
    "ChangelogRecoveryCachingITCase",
    "ChangelogRecoveryITCase",
    "ChangelogRecoveryRescaleITCase",
    "ChangelogRecoverySwitchEnvTestBase",
    "ChangelogRecoverySwitchStateBackendITCase",
    "ChangelogRescalingITCase",
    "ChangelogStateBackendHandleTest",
    "ChangelogStateBackendLoadingTest",
    "ChangelogStateBackendMigrationTest",
    "ChangelogStateDiscardTest",
    "ChangelogStorageMetricsTest",
    "ChangelogStreamHandleReaderWithCacheTest",
    "ChangelogTaskLocalStateStoreTest",
    "FsStateChangelogStorageTest",
    "FsStateChangelogWriterSqnTest",
    "FsStateChangelogWriterTest",
    "IncrementalStateReuseAfterFailureITCase",
    "KvStateChangeLoggerImplTest",
    "LocalChangelogRegistryTest",
    "MetadataV3SerializerTest",
    "PeriodicMaterializationManagerTest",
    "PriorityQueueStateChangeLoggerImplTest",
    "RetryingExecutorTest",
    "SharedStateRegistryTest",
    "StateChangeFsUploaderTest",
    "StateChangelogStorageLoaderTest",
    "StateChangelogStorageTest",
    "TaskChangelogRegistryImplTest",
    "TaskExecutorStateChangelogStoragesManagerTest",
    "TestStreamEnvironment",
]
"""Flink's tests of its changelog: the page has at least one row for each."""

FLINK_TESTS = 38
"""Number of Flink's tests that the page names; some share a row."""

OF_OUR_OWN = ("Defects of Flink's that must not be here", "What Flink does not test")
"""Areas whose rows have names of our own."""

SCENARIOS = {
    # area: number of scenarios; it decreases only if Flink drops a scenario, which the commit says
    "Writing the log": 18,
    "Uploads": 22,
    "Who deletes what, and when": 13,
    "Materialization": 6,
    "State as a function sees it": 13,
    "Loading, and what a host has of a job": 12,
    "Whole jobs": 12,
    "Defects of Flink's that must not be here": 15,
    "What Flink does not test": 11,
}


def tables() -> dict[str, list[list[str]]]:
    """Return the rows of the page's tables by area."""
    areas = {part.partition("\n")[0]: part for part in PAGE.split("\n## ")[1:]}
    return {
        area: [
            [cell.strip() for cell in line.strip("|").split(" | ")]
            for line in part.splitlines()
            if line.startswith("| ") and not line.endswith("| scenario | here |")
        ]
        for area, part in areas.items()
    }


ROWS = [row for rows in tables().values() for row in rows]


def test_no_class_is_left_out() -> None:
    """Every class of Flink's has its rows, in one area, and no row names a class that Flink does not have."""
    areas = [*tables().items()][: -len(OF_OUR_OWN)]
    found = [flink_class for _, rows in areas for flink_class in {row[0] for row in rows}]

    assert [area for area in tables() if area not in dict(areas)] == [*OF_OUR_OWN]
    assert sorted(found) == FLINK_CLASSES


def test_no_scenario_is_left_out() -> None:
    """Every area has all its scenarios: a new one must be counted here."""
    named = {name for _, scenario, _ in ROWS for name in re.findall(r"\btest[A-Z]\w+", scenario)}

    assert {area: len(rows) for area, rows in tables().items()} == SCENARIOS
    assert len(named) == FLINK_TESTS


def test_named_tests_exist() -> None:
    """Every scenario names existing tests, one by one, or says why it does not apply."""
    missing = []
    for _, scenario, shown in ROWS:
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", shown)
        assert named or shown.startswith("does not apply: "), scenario
        assert len(named) == shown.count(".py"), f"{scenario}: a file alone is no test"
        for file, name in named:
            path = TESTS / file
            if not path.is_file() or not re.search(rf"^ *def {name}\(", path.read_text(encoding="utf-8"), re.MULTILINE):
                missing.append(f"{file}::{name}")
    assert missing == []


def test_rows_are_sorted() -> None:
    """Rows of an area are sorted by class and scenario, each once: easy to find, and additions rarely conflict."""
    for area, rows in tables().items():
        keys = [(flink_class, scenario) for flink_class, scenario, _ in rows]
        assert keys == sorted(set(keys)), area
