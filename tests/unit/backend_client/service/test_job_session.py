"""How a process of a job reaches its host's service: address, token and certificates."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from backend_client.service import job_session
from backend_client.service.job_session import JobSession, connect, kept_client
from backend_client.settings import BackendSettings
from dstl_service.wire import CheckpointInfo, CheckpointRef, OpenedJob
from storage.errors import CorruptDataError, FencedError, InvalidInputError


@pytest.fixture
def token_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that returns the token which a client with given settings sends."""
    for name in ("DSTL_TOKEN", "DSTL_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    seen: list[Any] = []
    monkeypatch.setattr(job_session, "ServiceClient", lambda _address, token, *_args, **_options: seen.append(token))

    def token(**options: Any) -> str | None:
        connect(BackendSettings("file:///s", "job", **options))
        found: str | None = seen.pop()()
        return found

    return token


@pytest.mark.parametrize("service", ["unix:///s", None], ids=["given", "embedded"])
def test_token_comes_from_file_then_environment(
    service: str | None, token_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The option's file comes first, then the environment's file, then its token; only the first line counts."""
    files = [tmp_path / "option", tmp_path / "environment"]
    for path in files:
        path.write_text(f"{path.name}-token\nolder\n", encoding="utf-8")
    assert token_of(service=service) is None

    monkeypatch.setenv("DSTL_TOKEN", "plain-token")
    assert token_of(service=service) == "plain-token"
    monkeypatch.setenv("DSTL_TOKEN_FILE", str(files[1]))
    assert token_of(service=service) == "environment-token"
    assert token_of(service=service, token_file=str(files[0])) == "option-token"


def test_jobs_share_a_process_client(tmp_path: Path) -> None:
    """A worker has one connection, however many jobs its tasks are of; another storage's sidecar has its own."""
    folder = str(tmp_path)
    clients = {id(kept_client(BackendSettings("file:///s", f"job-{n}", local_dir=folder))) for n in range(1000)}

    assert len(clients) == 1
    for parent in ("any", "other"):
        assert id(kept_client(BackendSettings("file:///s", "fork", local_dir=folder, fork_of=parent))) in clients
    renaming = BackendSettings("file:///s", "renaming", local_dir=folder, renamed=(("a", "b"),), removed=("c",))
    assert id(kept_client(renaming)) in clients
    assert id(kept_client(BackendSettings("file:///s", "job-1", local_dir=folder, failover="deferred"))) in clients


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("storage", "file:///other"),
        ("service", "http://127.0.0.1:1"),
        ("token_file", "token"),
        ("ca_file", "/ca.pem"),
        ("certificate_file", "/certificate.pem"),
        ("trusted_uids", "12"),
        ("trusted_dir", "/pod"),
        ("patience_s", 3.0),
        ("sidecar_idle_exit_s", 7),
        ("sidecar_config_file", "/dstl.toml"),
    ],
)
def test_another_connection_has_its_own_client(tmp_path: Path, name: str, value: Any) -> None:
    """Each setting that says how to reach, prove oneself to, or start a sidecar has a client of its own."""
    settings = BackendSettings("file:///s", "job", local_dir=str(tmp_path))
    if name == "token_file":
        value = str(tmp_path / value)
        Path(value).write_text("secret\n", encoding="utf-8")

    assert kept_client(replace(settings, **{name: value})) is not kept_client(settings)


def test_missing_token_file_is_an_error(token_of: Any, tmp_path: Path) -> None:
    """A token file that is set must exist."""
    with pytest.raises(InvalidInputError, match="cannot be read"):
        token_of(token_file=str(tmp_path / "none"))


def test_empty_token_file_is_named(token_of: Any, tmp_path: Path) -> None:
    """The error of a token file without a token says which file it is."""
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(InvalidInputError, match="empty: there is no token"):
        token_of(token_file=str(tmp_path / "empty"))


@pytest.mark.parametrize(("patience_s", "own_s", "expected_s"), [(60.0, 0.0, 15.0), (8.0, None, 4.0), (1.0, None, 1.0)])
def test_impatient_client_kills_no_sidecar_early(
    monkeypatch: pytest.MonkeyPatch, patience_s: float, own_s: float | None, expected_s: float
) -> None:
    """The time after which a silent sidecar counts as hung follows from the job's patience; a health check has none."""
    ensured: list[Any] = []
    monkeypatch.setattr(job_session, "ServiceClient", lambda _a, _t, _p, ensure, **_o: ensured.append(ensure))

    connect(BackendSettings("file:///s", "job", patience_s=patience_s), own_s)

    assert [ensure.__self__.answer_timeout_s for ensure in ensured] == [expected_s]


def test_service_learns_the_storage() -> None:
    """A service of another storage can refuse the job, see `test_job_opener`."""
    sent: list[Any] = []

    class Client:
        def post(self, _path: str, body: Any) -> Any:
            sent.append(body)
            return {"job": "job", "job_uid": "u", "epoch": 1, "max_parallelism": 8, "service_id": "s", "latest": None}

    client: Any = Client()
    JobSession.open(client, BackendSettings("s3://bucket/prefix", "job", service="unix:///s"))

    assert sent[0]["storage"] == "s3://bucket/prefix"


@pytest.mark.parametrize(("stored", "is_other"), [(1, False), (2, True)])
def test_a_driver_learns_that_it_was_overtaken(monkeypatch: pytest.MonkeyPatch, stored: int, *, is_other: bool) -> None:
    """A query without new rows completes no checkpoint, which would tell it."""
    answer = {"job": "job", "job_uid": "u", "epoch": 1, "max_parallelism": 8, "latest": None}
    closed: list[bool] = []

    class Client:
        def post(self, _path: str, _body: Any) -> Any:
            return {**answer, "service_id": "s"}

        def get(self, _path: str) -> Any:
            return {**answer, "epoch": stored}

        def close(self) -> None:
            closed.append(True)

    client: Any = Client()
    monkeypatch.setattr(job_session, "connect", lambda _settings, _patience_s: client)
    session = JobSession.open(client, BackendSettings("file:///s", "job", service="unix:///s"))
    if is_other:
        with pytest.raises(FencedError, match="taken over by epoch 2"):
            session.check_owned()
    else:
        session.check_owned()
    assert closed == [True]


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_driver_knows_the_stored_checkpoints(*, is_damaged: bool) -> None:
    """An older one that is damaged ends no start: only the newest is built on."""
    newest = CheckpointInfo(CheckpointRef(4, 0, "m4"), None, 1, 0, "q", "", [], 0, 0)

    class Client:
        def get(self, path: str) -> Any:
            assert path == "/v1/jobs/job/checkpoints"
            if is_damaged:
                raise CorruptDataError("manifest 3 cannot be read")
            return [asdict(newest)]

    client: Any = Client()
    session = JobSession(client, BackendSettings("file:///s", "job"), OpenedJob("job", "u", 1, 8, None, "s"))
    assert session.stored() == ([] if is_damaged else [newest])
