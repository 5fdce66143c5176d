"""
Executors: which there are, frames whose tasks prefer some of them, and giving them up. Spark's SQL has none of these.

The rules of `session` hold here, too: nothing else uses these interfaces, and each failure says what is missing.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from backend_client.spark.private.session import java_frame, java_session, jvm_of, needed

_INSTEAD = "leave partitions unpinned: spark.shuffle.reduceLocality.enabled=true, and standby_replicas=0"
_DRIVER = "driver"
_RUNNING = "RUNNING"
_EXECUTOR_LEVEL = "PROCESS_LOCAL"
_TASKS_MAX = 100_000
_KILLED_WITHIN_S = 0.5

logger = logging.getLogger("backend_client")


def executor_addresses(spark: SparkSession) -> str:
    """Return the addresses of the executors that are alive now, and of the driver, in one text."""
    with needed("SparkContext.getExecutorMemoryStatus", _INSTEAD):
        return str(java_session(spark).sparkContext().getExecutorMemoryStatus().keySet().mkString(" "))


def executor_ids(spark: SparkSession) -> frozenset[str]:
    """Return the ids of the executors that are there now; one that replaces another may have its address."""
    with needed("SparkContext.getExecutorIds", _INSTEAD):
        return frozenset(str(java_session(spark).sparkContext().getExecutorIds().mkString(" ")).split())


def executors_at(spark: SparkSession, addresses: str) -> list[tuple[str, str, int]] | None:
    """
    Return each executor with one of these addresses: id, host and cores; None if Spark has not recorded them all yet.

    Args:
        spark: The application.
        addresses: The result of `executor_addresses`.
    """
    with needed("AppStatusStore.executorList", _INSTEAD):
        found = java_session(spark).sparkContext().statusStore().executorList(True)
        executors = map(found.apply, range(found.size()))
        known = {str(one.hostPort()): (str(one.id()), int(one.totalCores())) for one in executors}
    wanted = addresses.split()
    if not known.keys() >= set(wanted):
        return None
    named = ((known[address][0], address.rpartition(":")[0], known[address][1]) for address in wanted)
    return sorted((one for one in named if one[0] != _DRIVER), key=lambda one: (one[1], len(one[0]), one[0]))


def remove_executor(spark: SparkSession, executor: str, reason: str) -> None:
    """
    Have Spark count an executor as lost at once, and ask for another one.

    Args:
        spark: The application.
        executor: Its id; one that is not there is left alone.
        reason: For Spark's log and its errors.
    """
    with needed("CoarseGrainedSchedulerBackend.removeExecutor", "set links to False"):
        context, jvm = java_session(spark).sparkContext(), jvm_of(spark)
        lost = jvm.org.apache.spark.scheduler.ExecutorProcessLost(reason, jvm.scala.Option.empty(), False)
        # First it is to be killed, as by Spark itself: afterwards its id is unknown. That order does not reach a host
        # that is cut off, so the loss is declared, too. The cluster manager may be cut off as well, or be slow: Spark
        # waits two minutes for its answer.
        killing = threading.Thread(target=_kill, args=(context, executor), name="dstl-kill-executor", daemon=True)
        killing.start()
        killing.join(_KILLED_WITHIN_S)
        context.schedulerBackend().removeExecutor(executor, lost)


def end_waits(spark: SparkSession, lost: Collection[str]) -> int:
    """
    Have Spark run tasks at once that wait for lost executors; return how many these are.

    In a stage in which tasks of other executors wait, too, nothing is changed: Spark would place them anywhere. If a
    host that the tasks name has executors, with their tables or copies of them, the tasks still wait for that one.

    Args:
        spark: The application.
        lost: Ids of executors that are gone.
    """
    tracker, released = spark.sparkContext.statusTracker(), 0
    with needed("TaskSetManager.localityWaits", "lower spark.locality.wait and spark.locality.wait.node"):
        context = java_session(spark).sparkContext()
        scheduler, to_text = context.taskScheduler(), jvm_of(spark).java.util.Arrays.toString
        for stage in tracker.getActiveStageIds():
            found = tracker.getStageInfo(stage)
            if found is None:
                continue
            tasks = scheduler.taskSetManagerForAttempt(stage, found.currentAttemptId)
            if not tasks.isDefined():
                continue
            pending = _pending(tasks.get(), to_text)
            if pending and pending <= _named(tasks.get(), lost):
                has_host = any(map(scheduler.hasExecutorsAliveOnHost, _hosts(tasks.get(), pending)))
                _set_waits_to_0(tasks.get(), has_host=has_host)
                released += len(pending)
        if released:
            context.schedulerBackend().reviveOffers()
    return released


def _pending(tasks: Any, to_text: Callable[[Any], Any]) -> set[int]:
    """Return the indexes of a stage's tasks that neither run nor have succeeded."""
    arrays = tasks.copiesRunning(), tasks.successful()
    running, succeeded = (str(to_text(array)).strip("[]").split(", ") for array in arrays)
    states = enumerate(zip(running, succeeded, strict=True))
    return {at for at, state in states if state == ("0", "false")}


def _named(tasks: Any, executors: Collection[str]) -> set[int]:
    """Return the indexes of tasks that wait for these executors, and of some that did."""
    found = (tasks.pendingTasks().forExecutor().get(executor) for executor in executors)
    texts = [str(of_executor.get().mkString(" ")) for of_executor in found if of_executor.isDefined()]
    return {int(at) for text in texts for at in text.split()}


def _hosts(tasks: Any, indexes: Collection[int]) -> set[str]:
    """Return the hosts that these tasks name."""
    places = [tasks.tasks()[at].preferredLocations() for at in indexes]
    return {str(of_task.apply(at).host()) for of_task in places for at in range(of_task.size())}


def _set_waits_to_0(tasks: Any, *, has_host: bool) -> None:
    waits_ms = tasks.localityWaits()  # of each level of locality; Spark reads them when it places a task
    for at, level in enumerate(tasks.myLocalityLevels()):
        if not has_host or str(level) == _EXECUTOR_LEVEL:
            waits_ms[at] = 0


def _kill(context: Any, executor: str) -> None:
    try:
        context.killAndReplaceExecutor(executor)
    except Exception:
        logger.warning("executor %s could not be killed", executor, exc_info=True)


def kill_tasks(spark: SparkSession, group: str, reason: str) -> int:
    """
    Kill the running tasks of a group's jobs, which Spark then runs again; return their number.

    Args:
        spark: The application.
        group: The jobs' group; that of a streaming query's batches is its run's id.
        reason: For Spark's log.
    """
    tracker, killed = spark.sparkContext.statusTracker(), 0
    with needed("AppStatusStore.taskList", "set links to False"):
        context = java_session(spark).sparkContext()
        for job in set(tracker.getJobIdsForGroup(group)) & set(tracker.getActiveJobsIds()):
            info = tracker.getJobInfo(job)
            for stage in info.stageIds if info is not None else ():
                found = tracker.getStageInfo(stage)
                if found is None or not found.numActiveTasks:
                    continue
                tasks = context.statusStore().taskList(stage, found.currentAttemptId, _TASKS_MAX)
                for task in map(tasks.apply, range(tasks.size())):
                    if str(task.status()) == _RUNNING:
                        killed += bool(context.killTaskAttempt(task.taskId(), True, reason))
    return killed


def executor_location(executor: str | None, host: str) -> str:
    """Return the location that means one executor, or any executor of the host."""
    # Spark takes the text after the first underscore for the executor.
    return host if executor is None or "_" in host else f"executor_{host}_{executor}"


def located(numbered: DataFrame, locations: Sequence[Sequence[str]]) -> DataFrame:
    """
    Return a frame equal to `numbered`, in equal partitions, whose tasks prefer the given locations.

    Args:
        numbered: One column of integers, with the number i alone in partition i; made without adaptive execution.
        locations: Those of each partition, see `executor_location`.
    """
    with needed("LogicalRDD.fromDataset", _INSTEAD):
        spark = numbered.sparkSession
        jvm: Any = jvm_of(spark)
        to_seq, array_list = jvm.org.apache.spark.api.python.PythonUtils.toSeq, jvm.java.util.ArrayList
        named, seqs = array_list(), dict[tuple[str, ...], Any]()
        for names in map(tuple, locations):
            if names not in seqs:  # few differ, and each call into the JVM takes its time
                seqs[names] = to_seq(array_list(names))
            named.add(seqs[names])
        places = to_seq(named)
        session = java_session(spark)
        rdd = session.sparkContext().makeRDD(places.indices().zip(places), jvm.scala.reflect.ClassTag.Any())
        rows = session.createDataset(rdd, jvm.org.apache.spark.sql.Encoders.INT()).queryExecution().toRdd()
        relation = getattr(getattr(jvm.org.apache.spark.sql.execution, "LogicalRDD$"), "MODULE$")
        plan = relation.fromDataset(rows, java_frame(numbered), False, *_further_default(relation))
        return DataFrame(jvm.org.apache.spark.sql.classic.Dataset.ofRows(session, plan), spark)


def _further_default(relation: Any) -> list[Any]:
    """Return the default of the method's fourth parameter, which it has from Spark 4.3 on."""
    name = "fromDataset$default$4"
    has_one = any(str(method.getName()) == name for method in relation.getClass().getMethods())
    return [getattr(relation, name)()] if has_one else []
