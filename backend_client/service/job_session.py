"""
The driver's side of checkpoints: takes the job over; begins, completes and aborts checkpoints.

Talks to the coordinator, which is the service on the driver's host. Not thread-safe.
"""

from __future__ import annotations

import logging
import os
import platform
import stat
import uuid
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, fields, replace
from functools import cache, partial
from operator import attrgetter
from typing import Any, TypeVar

from backend_client.progress import BatchProgress
from backend_client.service.client import ServiceClient
from backend_client.service.launcher import AutoStartedSidecar
from backend_client.settings import BackendSettings
from dstl_service.wire import (
    BatchFigures,
    BeginResponse,
    ChangeSetRef,
    CheckpointInfo,
    CheckpointRef,
    CompleteRequest,
    CompleteResponse,
    ForkOrigin,
    ForkRequest,
    FormerSlots,
    JobInfo,
    LinkAddress,
    OpenedJob,
    OpenJob,
    OpenLinks,
    OperatorInfo,
    RowsSetAside,
    StateInfo,
    parse_tokens,
)
from storage.errors import CorruptDataError, DstlError, FencedError, InvalidInputError, NotFoundError
from storage.private_folder import check_folder

logger = logging.getLogger("backend_client")

_Client = TypeVar("_Client", bound=ServiceClient)

_connection = attrgetter(
    *("storage", "service", "token_file", "ca_file", "certificate_file", "local_dir", "trusted_uids", "trusted_dir"),
    *("patience_s", "sidecar_idle_exit_s", "sidecar_config_file"),
)
"""Returns the settings that `connect_as` reads: jobs that differ in others only are served by one client."""
_clients: dict[object, ServiceClient] = {}


def connect(settings: BackendSettings, patience_s: float | None = None) -> ServiceClient:
    """
    Return a client of this host's service; for an auto-started one, one that may start it.

    Args:
        settings: The job's settings.
        patience_s: How long the client repeats a request, by default as in the settings. Even a client without patience
            gives a silent sidecar the settings' time before it is killed: it has the change sets of other clients, too.
    """
    return connect_as(ServiceClient, settings, patience_s, may_start=True)


def connect_as(
    kind: type[_Client], settings: BackendSettings, patience_s: float | None = None, *, may_start: bool
) -> _Client:
    """
    Return a client of this host's service, as `connect` does.

    Args:
        kind: The client's class.
        settings: The job's settings.
        patience_s: How long the client repeats a request, by default as in the settings.
        may_start: Whether it starts the host's sidecar if none runs.
    """
    patience_s = settings.patience_s if patience_s is None else patience_s
    token = partial(_token, settings)
    address = settings.host_service
    if address is not None:
        return kind(
            address,
            token,
            patience_s,
            ca_file=settings.host_ca_file,
            trust=settings.host_trust,
            certificate=settings.host_certificate,
        )
    embedded = auto_started_sidecar(settings)
    embedded = replace(embedded, answer_timeout_s=max(1.0, min(embedded.answer_timeout_s, settings.patience_s / 2)))
    ensure: Callable[[], None] | None = embedded.ensure if may_start else None
    check_folder(embedded.folder, embedded.trust)  # its owner could answer on the socket
    return kind(embedded.address, token, patience_s, ensure, trust=settings.host_trust)


def kept_client(settings: BackendSettings) -> ServiceClient:
    """
    Return this process's client, made at the first call: a worker runs many tasks.

    Jobs that connect alike share one: a worker may run tasks of any number of jobs, and each client keeps a connection
    open.
    """
    place = _connection(settings)
    client = _clients.get(place)
    if client is None:
        client = _clients[place] = connect(settings)
    return client


def auto_started_sidecar(settings: BackendSettings) -> AutoStartedSidecar:
    """Return this host's auto-started sidecar for the settings' storage."""
    return AutoStartedSidecar(
        settings.storage,
        settings.host_folder,
        settings.sidecar_idle_exit_s,
        settings.sidecar_config_file,
        settings.host_trust,
    )


class JobSession:
    """One driver's ownership of a job."""

    def __init__(self, client: ServiceClient, settings: BackendSettings, opened: OpenedJob) -> None:
        self._client = client
        self._settings = settings
        self._path = f"/v1/jobs/{settings.job}"
        self.job_uid = opened.job_uid
        self.epoch = opened.epoch
        self.max_parallelism = opened.max_parallelism
        self.latest: CheckpointInfo | None = opened.latest

    @classmethod
    def find(cls, client: ServiceClient, settings: BackendSettings) -> JobInfo | None:
        """Return the stored job without taking it over; None if it does not exist yet."""
        try:
            answer = client.get(f"/v1/jobs/{settings.job}")
        except NotFoundError:
            return None
        return JobInfo(**_with_latest(answer))

    @staticmethod
    def fork(client: ServiceClient, settings: BackendSettings) -> None:
        """
        Create the job as a fork, as the settings say; may be repeated.

        Raises:
            NotFoundError: The parent has no such checkpoint or savepoint.
            ConflictError: A job of this name exists, or one of the two is deleted.
        """
        at = settings.fork_at
        groups = settings.max_parallelism
        request = ForkRequest(None, at, groups) if isinstance(at, str) else ForkRequest(at, None, groups)
        client.post(f"/v1/jobs/{settings.fork_of}/forks/{settings.job}", asdict(request))

    @classmethod
    def open(cls, client: ServiceClient, settings: BackendSettings) -> JobSession:
        """
        Take the job over; fences every older driver of it.

        Raises:
            DstlError: The storage cannot be written, or it or `max_parallelism` is not the job's.
        """
        owner = f"{platform.node()}:{os.getpid()}"
        request = OpenJob(owner, settings.max_parallelism, settings.storage)
        answer = client.post(f"/v1/jobs/{settings.job}/epochs", asdict(request))
        return cls(client, settings, OpenedJob(**_with_latest(answer)))

    def check_owned(self, patience_s: float | None = 0.0) -> None:
        """
        Ask the store whether the job is still this driver's; any thread may. The patience is as in `connect`.

        Raises:
            FencedError: Another driver took the job over, or it was rewound.
            UnavailableError: There is no answer.
        """
        with closing(connect(self._settings, patience_s)) as client:
            known = self.find(client, self._settings)
        if known is not None and known.epoch > self.epoch:
            raise FencedError.taken_over(self._settings.job, self.epoch, known.epoch)

    def stored(self) -> list[CheckpointInfo]:
        """Return the newest checkpoint and its stored predecessors, oldest first; none if one cannot be read."""
        try:
            answer = self._client.get(f"{self._path}/checkpoints")
        except CorruptDataError as error:  # an older one, which no restore of the newest needs
            logger.warning("the checkpoints of job %s cannot be listed: %s", self._settings.job, error)
            return []
        return [_checkpoint(item) for item in answer]

    @property
    def base(self) -> CheckpointRef | None:
        """The checkpoint on which the next batch builds."""
        return self.latest.ref if self.latest else None

    def begin(self, checkpoint_id: int) -> BeginResponse:
        """
        Start a checkpoint; the answer has the id of the coordinator's process, which changes with every start.

        Raises:
            FencedError: Another driver took the job over.
        """
        answer = self._client.post(f"{self._path}/checkpoints/{checkpoint_id}/begin", {"epoch": self.epoch})
        return BeginResponse(str(answer["service_id"]), answer.get("parallelism", {}), answer.get("requests", {}))

    def open_links(self, host: str, bind_address: str, port: int) -> LinkAddress:
        """
        Have the coordinator accept links of other hosts; return the address for their tasks.

        Args:
            host: Under which other hosts reach the coordinator's host.
            bind_address: On which the coordinator listens.
            port: Its port; 0: any.

        Raises:
            InvalidInputError: The address cannot be listened on.
        """
        request = OpenLinks(self.epoch, host, bind_address, port)
        return LinkAddress(**self._client.post(f"{self._path}/link-address", asdict(request)))

    def plan(
        self,
        refs: list[ChangeSetRef],
        operators: list[OperatorInfo],
        query_id: str,
        offsets: str,
        materializations: Sequence[dict[str, Any]] = (),
        closed_ms: int | None = None,
    ) -> CompleteRequest:
        """Return the next checkpoint's content, the base and these change sets; for `flush`, then `complete`."""
        taken = list(materializations)
        return CompleteRequest(
            self.epoch, uuid.uuid4().hex, self.base, refs, operators, query_id, offsets, taken, closed_ms
        )

    def flush(self, checkpoint_id: int, plan: CompleteRequest) -> None:
        """Start the upload of the checkpoint's change sets without waiting for it."""
        self._client.post(f"{self._path}/checkpoints/{checkpoint_id}/flush", asdict(plan))

    def complete(self, checkpoint_id: int, plan: CompleteRequest) -> CompleteResponse:
        """
        Complete the checkpoint; waits for a slow store up to `checkpoint_timeout_s`.

        Raises:
            FencedError: Another driver took the job over; this one must stop.
            LostChangesError: A sidecar died with a change set that was not durable; execute the batch again.
        """
        answer = self._client.post(
            f"{self._path}/checkpoints/{checkpoint_id}/complete",
            asdict(plan),
            patience_s=self._settings.checkpoint_timeout_s,
        )
        response = CompleteResponse(**{**answer, "ref": CheckpointRef(**answer["ref"])})
        self.latest = CheckpointInfo(
            ref=response.ref,
            base=plan.base,
            epoch=self.epoch,
            created_ms=0,
            query_id=plan.query_id,
            offsets=plan.offsets,
            operators=plan.operators,
            segments=len(plan.refs),
            segment_bytes=sum(ref.size_bytes for ref in plan.refs),
            closed_ms=plan.closed_ms,
        )
        return response

    def report(self, progress: BatchProgress) -> None:
        """Send a finished batch's figures to the coordinator's metrics; a failure is only logged."""
        try:
            self._client.post(f"{self._path}/batches", asdict(figures_of(progress)), patience_s=0.0)
        except DstlError as error:
            logger.warning("the coordinator's metrics lack batch %d: %s", progress.batch_id, error)

    def abort(self, checkpoint_id: int) -> None:
        """Give the checkpoint up."""
        self._client.post(f"{self._path}/checkpoints/{checkpoint_id}/abort", {"epoch": self.epoch})


def figures_of(progress: BatchProgress) -> BatchFigures:
    """Return a batch's figures for the coordinator, rounded to integers."""
    return BatchFigures(**{field.name: round(getattr(progress, field.name)) for field in fields(BatchFigures)})


def _token(settings: BackendSettings) -> str | None:
    path = settings.token_file or os.environ.get("DSTL_TOKEN_FILE")
    if not path:
        return os.environ.get("DSTL_TOKEN") or None
    try:
        with open(path, encoding="utf-8") as file:
            _warn_if_readable(path, os.fstat(file.fileno()).st_mode)
            return parse_tokens(file.read())[0]
    except InvalidInputError as error:
        raise InvalidInputError(f"token_file {path}: {error}") from None
    except OSError as error:
        raise InvalidInputError(
            f"token_file {path} cannot be read: {error.strerror}; it must be readable by the tasks on every host"
        ) from error


@cache
def _warn_if_readable(path: str, mode: int) -> None:
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        logger.warning("token_file %s can be read by other users; run chmod 600 on it", path)


def _with_latest(answer: dict[str, Any]) -> dict[str, Any]:
    latest = answer["latest"]
    return {**answer, "latest": _checkpoint(latest) if latest else None}


def _checkpoint(data: dict[str, Any]) -> CheckpointInfo:
    return CheckpointInfo(
        **{
            **data,
            "ref": CheckpointRef(**data["ref"]),
            "base": CheckpointRef(**data["base"]) if data["base"] else None,
            "rewound_from": CheckpointRef(**data["rewound_from"]) if data.get("rewound_from") else None,
            "forked_from": _origin(data["forked_from"]) if data.get("forked_from") else None,
            "operators": [
                OperatorInfo(
                    **{
                        **item,
                        "states": {name: StateInfo(**state) for name, state in item["states"].items()},
                        "set_aside": [RowsSetAside(**rows) for rows in item.get("set_aside", ())],
                        "recent": [CheckpointRef(**ref) for ref in item.get("recent", ())],
                        "former_slots": _former_slots(item.get("former_slots")),
                    }
                )
                for item in data["operators"]
            ],
        }
    )


def _former_slots(data: dict[str, Any] | None) -> FormerSlots | None:
    return FormerSlots(data["number"], CheckpointRef(**data["published"])) if data else None


def _origin(data: dict[str, Any]) -> ForkOrigin:
    return ForkOrigin(**{**data, "checkpoint": CheckpointRef(**data["checkpoint"])})
