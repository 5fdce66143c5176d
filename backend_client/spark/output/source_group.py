"""
An output that also commits the sources' offsets to a consumer group after each checkpoint.

Monitoring of Kafka then shows the query's lag. Spark's source never reads the group: a query begins where its
checkpoint says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pyspark.sql import DataFrame

from backend_client.service.job_session import JobSession
from backend_client.settings import BackendSettings
from backend_client.sources.background_commits import BackgroundCommits
from backend_client.sources.kafka_positions import OPTION, Cluster, clusters
from backend_client.spark.batch import BatchContext
from backend_client.spark.output.outputs import Output, OutputPlan, PlaceNumbers
from backend_client.spark.output.spark_sinks import BatchIds
from backend_client.spark.private.session import stream_sources
from backend_client.spark.shipping import Shipments
from dstl_service.wire import ChangeSetRef, CheckpointRef, JobInfo, OperatorInfo
from storage.errors import InvalidInputError

_LAST_COMMIT_S = 5.0
"""How long the end of a query waits for the last commit."""


def is_group_option(name: str) -> bool:
    """Return whether an option of the writer, in lower case, is about the consumer group."""
    return name == OPTION or name.startswith(f"{OPTION}.")


def with_group(output: OutputPlan, source: DataFrame, options: Mapping[str, str]) -> OutputPlan:
    """
    Return the output, with the consumer group that the writer's options name, if they do.

    Args:
        output: The output.
        source: The query's stream, with all of its sources.
        options: The writer's options.

    Raises:
        InvalidInputError: The options are about a group without naming it, the query has no Kafka source, or an option
            has no equivalent.
    """
    given = {name.lower(): value for name, value in options.items() if is_group_option(name.lower())}
    if not given:
        return output
    name = given.pop(OPTION, "").strip()
    if not name:
        raise InvalidInputError(f"{', '.join(given) or 'consumerGroup'} needs the group: option('consumerGroup', name)")
    of_librdkafka = {option.removeprefix(f"{OPTION}."): value for option, value in given.items()}
    return GroupPlan(output, name, tuple(clusters(stream_sources(source), of_librdkafka)))


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """
    An output and a consumer group, before the query takes its job over.

    Args:
        output: The output.
        group: Name of the group.
        clusters: The clusters that the query reads from.
    """

    output: OutputPlan
    group: str
    clusters: tuple[Cluster, ...]

    def check(self, settings: BackendSettings, job: JobInfo | None, shipments: Shipments) -> None:
        """Check the output, and the options of the group; the brokers are not asked."""
        self._commits(settings.job)
        self.output.check(settings, job, shipments)

    def open(
        self,
        settings: BackendSettings,
        session: JobSession,
        shipments: Shipments,
        place_numbers: PlaceNumbers,
        ids: BatchIds,
    ) -> Output:
        """Return the output of a query that owns its job."""
        inner = self.output.open(settings, session, shipments, place_numbers, ids)
        return GroupOutput(inner, session, tuple(zip(self.clusters, self._commits(settings.job), strict=True)))

    def _commits(self, job: str) -> list[BackgroundCommits]:
        try:
            from backend_client.sources.consumer_group import ConsumerGroup  # confluent-kafka is optional
        except ImportError as error:
            raise InvalidInputError(
                "the option consumerGroup needs confluent-kafka on the driver: pip install 'confluent-kafka>=2.10'"
            ) from error
        groups = [ConsumerGroup(self.group, cluster.connection, job) for cluster in self.clusters]
        return [BackgroundCommits(f"consumer group {self.group!r}", group.commit) for group in groups]


class GroupOutput(Output):
    """
    An output whose checkpoints' offsets are committed.

    Args:
        output: The output.
        session: The query's ownership of its job: its newest checkpoint has the offsets.
        commits: The clusters, and what commits to each.
    """

    def __init__(
        self, output: Output, session: JobSession, commits: Sequence[tuple[Cluster, BackgroundCommits]]
    ) -> None:
        self._output = output
        self._session = session
        self._commits = commits

    @property
    def operators(self) -> Sequence[OperatorInfo]:
        """Those of the output."""
        return self._output.operators

    @property
    def unpublished(self) -> int:
        """That of the output."""
        return self._output.unpublished

    @property
    def is_seen_early(self) -> bool:
        """That of the output."""
        return self._output.is_seen_early

    def start(self) -> None:
        """Begin, and commit what an earlier run left, or what a rewind gave back."""
        self._submit()
        self._output.start()

    def before_batch(self, last: OperatorInfo) -> None:
        """See `Output`."""
        self._output.before_batch(last)

    def log(self, frame: DataFrame, context: BatchContext) -> Sequence[ChangeSetRef]:
        """See `Output`."""
        return self._output.log(frame, context)

    def before_checkpoint(self, frame: DataFrame, batch_id: int) -> None:
        """See `Output`."""
        self._output.before_checkpoint(frame, batch_id)

    def after_checkpoint(self, frame: DataFrame, checkpoint: CheckpointRef) -> None:
        """Have the offsets committed: the checkpoint exists, whatever becomes of its output."""
        self._submit()
        self._output.after_checkpoint(frame, checkpoint)

    def stop_waiting(self) -> None:
        """See `Output`."""
        self._output.stop_waiting()

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until everything is published, and a moment for the last commit."""
        try:
            return self._output.drain(timeout_s)
        finally:
            for _, commits in self._commits:
                commits.flush(_LAST_COMMIT_S if timeout_s is None else min(_LAST_COMMIT_S, timeout_s))

    def close(self) -> None:
        """Stop committing."""
        self._output.close()
        for _, commits in self._commits:
            commits.close()

    def _submit(self) -> None:
        latest = self._session.latest
        if latest is not None:
            for cluster, commits in self._commits:
                commits.submit(cluster.positions(latest.offsets), latest.ref.id)
