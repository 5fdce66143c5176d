"""docs/flink-checklist.md leaves no scenario of Flink's out, names tests that exist, and is in order."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

TESTS = Path(__file__).resolve().parent
PAGE = (TESTS.parent / "docs/flink-checklist.md").read_text(encoding="utf-8")

EXPECTED: dict[str, dict[str, tuple[str, ...]]] = {
    # area: class: what its rows must have; where Flink's tests have no names here, a word of each scenario
    "Writing the log": {
        "FsStateChangelogWriterTest": (
            *("testAppend", "testPreUpload", "testPersist", "testPersistAgain", "testNoReUploadBeforeCompletion"),
            *("testPersistNewlyAppended", "testPersistAfterReset", "testPersistFailure", "testPersistFailedChanges"),
            *("testPersistNonFailedChanges", "testTruncate", "testFileAvailableAfterPreUpload"),
            *("testFileAvailableAfterClose", "testLocalFileDiscard", "testLocalFileAfterMaterialize"),
            "testLocalFileAbort",
        ),
        "FsStateChangelogWriterSqnTest": ("sequence number",),
        "FsStateChangelogStorageTest": ("after close", "testDeadlockOnUploadCompletion"),
        "StateChangelogStorageTest": ("round trip",),
    },
    "Uploads": {
        "BatchingStateChangeUploadSchedulerTest": (
            *("testNoDelayAndThreshold", "testSizeThreshold", "testDelay", "testRetry", "testUploadTimeout"),
            *("testRetryOnTimeout", "testErrorHandling", "testClose", "testBackPressure"),
            "testInterruptedWhenBackPressured",
        ),
        "RetryingExecutorTest": (
            *("testNoRetries", "testFixedRetryLimit", "testFixedRetrySuccess", "testNonRetryableException"),
            *("testRetryDelay", "testNoRetryDelayIfTimeout", "testTimeout", "testDiscardOnTimeout"),
        ),
        "StateChangeFsUploaderTest": ("base path", "stream is closed"),
        "ChangelogStorageMetricsTest": ("uploads, sizes, failures, batch sizes, attempts, queue size",),
    },
    "Who deletes what, and when": {
        "ChangelogStateDiscardTest": (
            *("materialized after subsumption", "subsumed after materialization", "not without the subsumption"),
            *("upload ends after the truncation", "on close", "two backends"),
        ),
        "TaskChangelogRegistryImplTest": ("nobody refers", "never what the checkpoint owns"),
        "LocalChangelogRegistryTest": ("latest checkpoint",),
        "SharedStateRegistryTest": ("registered twice", "initial checkpoint", "de-registered"),
        "ChangelogStateBackendHandleTest": ("ids and sizes",),
        "MetadataV3SerializerTest": ("ids and sizes",),
        "IncrementalStateReuseAfterFailureITCase": ("failed checkpoint",),
    },
    "Materialization": {
        "ChangelogKeyedStateBackendTest": ("materialization's id", "confirmed or failed"),
        "PeriodicMaterializationManagerTest": ("first delay",),
        "ChangelogMetricGroupTest": ("completed", "skipped", "failed", "gauges"),
    },
    "State as a function sees it": {
        "ChangelogDelegateHashMapTest": ("suite",),
        "ChangelogDelegateHashMapInMemoryTest": ("suite",),
        "ChangelogDelegateEmbeddedRocksDBStateBackendTest": (
            *("whole suite", "testMaterializedRestore", "testMaterializedRestorePriorityQueue"),
            *("testMaterializedRestoreWithWrappedState", "TTL", "de-registered"),
        ),
        "ChangelogDelegateStateTest": ("delegates",),
        "ChangelogStateBackendMigrationTest": ("serializer",),
        "ChangelogListStateTest": ("mutator", "reads"),
        "ChangelogMapStateTest": ("mutator", "reads", "iteration"),
        "ChangelogPqStateTest": ("poll",),
        "KvStateChangeLoggerImplTest": ("metadata", "key group"),
        "PriorityQueueStateChangeLoggerImplTest": ("queues",),
    },
    "Loading, and what a host has of a job": {
        "ChangelogStateBackendLoadingTest": ("precedence", "enable and disable", "recursive", "recovery"),
        "StateChangelogStorageLoaderTest": ("discovery", "unknown"),
        "TaskExecutorStateChangelogStoragesManagerTest": ("one storage", "released", "same for all", "shutdown"),
        "ChangelogTaskLocalStateStoreTest": ("prune, confirm and abort", "reload", "corrupt"),
        "ChangelogStreamHandleReaderWithCacheTest": ("twice",),
    },
    "Whole jobs": {
        "ChangelogRecoveryITCase": ("log only", "failing twice", "failed materialization", "hashmap, rocksdb"),
        "ChangelogRecoveryRescaleITCase": ("out and in",),
        "ChangelogRescalingITCase": ("6 to 4 and 4 to 6", "timers, windows, unaligned"),
        "ChangelogRecoverySwitchStateBackendITCase": ("on to off", "with rescaling", "off to on", "private state"),
        "ChangelogRecoverySwitchEnvTestBase": ("plain backend",),
        "ChangelogLocalRecoveryITCase": ("killed and started again",),
        "ChangelogRecoveryCachingITCase": ("at most once",),
        "ChangelogCompatibilityITCase": ("canonical savepoint", "native savepoint", "checkpoint"),
        "TestStreamEnvironment": ("at random",),
    },
    "Defects of Flink's that must not be here": {
        "FLINK-24852": ("orphans",),
        "FLINK-25850": ("abort",),
        "FLINK-30792": ("pre-emptive upload",),
        "FLINK-32085": ("small files",),
        "FLINK-32908": ("materialization id",),
        "FLINK-40302": ("savepoint",),
        "back-pressure": ("soft",),
        "close": ("failed close",),
        "failed upload": ("blocks all following checkpoints",),
        "hedging": ("losing attempts",),
        "integrity": ("flipped bit",),
        "local disk": ("broken",),
        "materialization interval": ("shared files",),
        "retries": ("real uploader",),
        "savepoints": ("share files",),
    },
    "What Flink does not test": {
        "*not covered by Flink*": (
            *("real uploader: write, close, partial file", "retries with the real uploader", "corruption", "orphan"),
            *("between upload and acknowledgement", "full disk", "2 GiB", "starvation", "after savepoints", "replay"),
        )
    },
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


def test_no_scenario_is_left_out() -> None:
    """Every area has exactly the classes of the list above, and their rows everything that the list says."""
    found: dict[str, dict[str, str]] = {}
    for area, rows in tables().items():
        scenarios: defaultdict[str, str] = defaultdict(str)
        for flink_class, scenario, _ in rows:
            scenarios[flink_class] += f"\n{scenario}"
        found[area] = scenarios

    assert {area: set(classes) for area, classes in found.items()} == {
        area: set(classes) for area, classes in EXPECTED.items()
    }
    missing = [
        f"{flink_class}: {wanted}"
        for area, classes in EXPECTED.items()
        for flink_class, scenarios in classes.items()
        for wanted in scenarios
        if not re.search(rf"(?<!\w){re.escape(wanted)}(?!\w)", found[area][flink_class])
    ]
    assert missing == []


def test_named_tests_exist() -> None:
    """Every scenario names tests that are there, one by one, or says why it does not apply."""
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
    """Rows of an area are sorted by class and scenario, each once, so that one is found and additions do not meet."""
    for area, rows in tables().items():
        keys = [(flink_class, scenario) for flink_class, scenario, _ in rows]
        assert keys == sorted(set(keys)), area
