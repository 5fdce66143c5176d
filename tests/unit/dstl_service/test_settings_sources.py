"""Where settings come from: command line, environment, file, defaults, in this order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, get_args

import pytest

from dstl_service import cli, settings_sources
from dstl_service.settings import ServiceSettings
from dstl_service.settings_sources import Setting, known_settings, load_settings
from storage.errors import InvalidInputError

STORAGE = {"storage": "memory://x"}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Return the path of a small settings file."""
    path = tmp_path / "dstl.toml"
    path.write_text(
        'storage = "memory://file"\nio_threads = 3\nsocket_path = "/s"\n[batch]\ndelay_ms = 1\nsize_bytes = 2\n'
        "[upload]\nthreads = 7\n",
        encoding="utf-8",
    )
    return path


def load(text: str, tmp_path: Path) -> ServiceSettings:
    path = tmp_path / "dstl.toml"
    path.write_text('storage = "memory://x"\n' + text, encoding="utf-8")
    return load_settings({}, {}, str(path))


def test_stronger_source_wins(config: Path) -> None:
    """The command line overrides the environment, which overrides the file, which overrides the default."""
    settings = load_settings(
        {"batch.delay_ms": "4", "storage": None},
        {"DSTL_BATCH_DELAY_MS": "5", "DSTL_BATCH_SIZE_BYTES": "6", "DSTL_UPLOAD_ATTEMPTS_MAX": "2"},
        str(config),
    )

    assert (settings.batch.delay_ms, settings.batch.size_bytes, settings.upload.threads) == (4, 6, 7)
    assert (settings.storage, settings.upload.attempts_max, settings.upload.timeout_ms) == ("memory://file", 2, 1000)
    assert settings.socket_path == Path("/s")


def test_environment_names_file(config: Path) -> None:
    """Without --config, DSTL_CONFIG names the settings file."""
    assert load_settings({}, {"DSTL_CONFIG": str(config)}).io_threads == 3


def test_process_environment_is_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a mapping, the variables are those of the process."""
    monkeypatch.setenv("DSTL_UPLOAD_THREADS", "9")

    assert load_settings(STORAGE).upload.threads == 9


def test_older_variables_still_work() -> None:
    """The variables' names from before the groups still work."""
    changed = load_settings(
        STORAGE,
        {
            "DSTL_BATCH_DELAY_MS": "1",
            "DSTL_BATCH_SIZE_BYTES": "2",
            "DSTL_IN_FLIGHT_BYTES_MAX": "3",
            "DSTL_UPLOAD_TIMEOUT_MS": "4",
            "DSTL_UPLOAD_ATTEMPTS_MAX": "5",
            "DSTL_UPLOAD_DELAY_AFTER_ERROR_MS": "6",
            "DSTL_UPLOAD_THREADS": "7",
            "DSTL_IO_THREADS": "8",
            "DSTL_CACHE_BYTES_MAX": "9",
            "DSTL_GC_INTERVAL_S": "10",
            "DSTL_GC_AGE_MIN_S": "1100",
            "DSTL_SHUTDOWN_TIMEOUT_S": "12",
        },
    )

    assert (changed.batch.delay_ms, changed.batch.size_bytes, changed.batch.in_flight_bytes_max) == (1, 2, 3)
    assert (changed.upload.timeout_ms, changed.upload.attempts_max, changed.upload.delay_after_error_ms) == (4, 5, 6)
    assert (changed.upload.threads, changed.io_threads, changed.cache.bytes_max) == (7, 8, 9)
    assert (changed.gc.interval_s, changed.gc.age_min_s, changed.shutdown_timeout_s) == (10, 1100, 12)


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("DSTL_BATCH_SIZE_BYTES", "10MB", "DSTL_BATCH_SIZE_BYTES must be a whole number, it is '10MB'"),
        ("DSTL_BATCH_SIZE_BYTES", "", "whole number"),
        ("DSTL_IN_FLIGHT_BYTES_MAX", "5", "in_flight_bytes_max"),
        ("DSTL_BATCH_DELAY", "5", "did you mean DSTL_BATCH_DELAY_MS"),
        ("DSTL_BATCH_SIZE", "5", "did you mean DSTL_BATCH_SIZE_BYTES"),
        ("DSTL_UPLOAD_PATIENCE", "5", "DSTL_UPLOAD_PATIENCE is not a setting"),
        ("DSTL_SHUTDOWN_TIMEOUT", "5", "did you mean DSTL_SHUTDOWN_TIMEOUT_S"),
        ("DSTL_SSE", "aws:kms", "did you mean DSTL_S3_SSE?"),
        ("DSTL_CHECKPOINTS_MAX", "5", "did you mean DSTL_RETENTION_CHECKPOINTS_MAX"),
        ("DSTL_CONFIG_FILE", "/dstl.toml", "did you mean DSTL_CONFIG?"),
        ("DSTL_CONF", "/dstl.toml", "did you mean DSTL_CONFIG?"),
        ("DSTL_SERVCE", "unix:///s", "did you mean DSTL_SERVICE?"),
        ("DSTL_CLIENT_CERT_FILE", "/c", "did you mean DSTL_CLIENT_CERTIFICATE_FILE?"),
    ],
)
def test_wrong_variable_is_refused(variable: str, value: str, message: str) -> None:
    """A variable with a value of the wrong type, or with a name that resembles a setting's, stops the start."""
    with pytest.raises(InvalidInputError, match=message):
        load_settings(STORAGE, {variable: value})


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("DSTL_SERVICE", "unix:///s"),
        ("DSTL_LOCAL_DIR", "/tmp"),
        ("DSTL_CHAOS_SEED", "1"),
        ("DSTL_SERVICE_HOST", "10.0.0.1"),
        ("DSTL_PORT", "tcp://10.0.0.1:80"),
        ("DSTL_PORT_80_TCP_ADDR", "10.0.0.1"),
        ("DSTL_CACHE_SERVICE_PORT", "80"),
        ("DSTL_CONFIG_SERVICE_HOST", "10.0.0.1"),
        ("DSTL_CONFIG_PORT_80_TCP", "tcp://10.0.0.1:80"),
        ("OTHER", "x"),
    ],
)
def test_variable_of_others_is_left_alone(variable: str, value: str) -> None:
    """Variables of the backend, of tests or of Kubernetes do not disturb the service."""
    assert load_settings(STORAGE, {variable: value}) == load_settings(STORAGE, {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[batch]\ndelay_s = 1", "'batch.delay_s' in .*dstl.toml is not a setting; the nearest is 'batch.delay_ms'"),
        ("[bach]\ndelay_ms = 1", "the nearest is 'batch.delay_ms'"),
        ("io_thread = 1", "the nearest is 'io_threads'"),
        ("io_threads = '1'", "io_threads in .*dstl.toml must be a whole number"),
        ("io_threads = true", "whole number"),
        ("io_threads = 1.5", "whole number"),
        ("host = 1", "host in .* must be text"),
        ("batch = 1", "'batch' in .* is not a setting"),
        ("io_threads = ", "not valid TOML"),
        ("[batch]\nsize_bytes = 1_000_000_000", "in_flight_bytes_max"),
    ],
)
def test_wrong_file_is_refused(text: str, message: str, tmp_path: Path) -> None:
    """A file with an unknown name, a value of the wrong type or values that do not fit stops the start."""
    with pytest.raises(InvalidInputError, match=message):
        load(text, tmp_path)


def test_missing_file_is_refused() -> None:
    """A settings file that is named must exist."""
    with pytest.raises(InvalidInputError, match=r"/none.toml cannot be read"):
        load_settings(STORAGE, {}, "/none.toml")


def test_storage_must_be_named() -> None:
    """There is no default for the storage; the message says how to give it."""
    with pytest.raises(InvalidInputError, match="DSTL_STORAGE"):
        load_settings({}, {})


def test_unknown_name_on_command_line_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """--set refuses an unknown setting, and one without a value, before anything is opened."""
    assert cli.main(["serve", "--storage", "memory://x", "--set", "batch.dely_ms=1"]) == 2
    assert cli.main(["serve", "--storage", "memory://x", "--set", "batch.delay_ms"]) == 2

    refusals = capsys.readouterr().err
    assert "the nearest is 'batch.delay_ms'" in refusals
    assert "has no value" in refusals


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (int, "7", 7),
        (float, "0.5", 0.5),
        (bool, "true", True),
        (bool, "0", False),
        (str, "a b", "a b"),
        (Path, "/a", Path("/a")),
        (Literal["a", "b"], "b", "b"),
    ],
)
def test_text_is_read_by_type(kind: Any, text: str, value: Any) -> None:
    """Each type of setting has one text form."""
    assert Setting("group", "name", kind, False, None, False).parse(text, "here") == value


@pytest.mark.parametrize(
    ("kind", "text", "must"),
    [
        (int, "7.0", "a whole number"),
        (float, "nan", "a number"),
        (bool, "yes", "true or false"),
        (Literal["a", "b"], "c", "one of a, b"),
    ],
)
def test_text_of_other_type_is_refused(kind: Any, text: str, must: str) -> None:
    """Text of another form is refused; the message says what a value must be, and does not repeat a secret."""
    with pytest.raises(InvalidInputError, match=f"here must be {must}, it is '{text}'"):
        Setting("group", "name", kind, False, None, False).parse(text, "here")
    with pytest.raises(InvalidInputError, match="it is something else"):
        Setting("group", "name", kind, False, None, True).parse(text, "here")


def test_empty_text_is_no_value() -> None:
    """An optional setting is unset if its variable is empty."""
    assert load_settings(STORAGE, {"DSTL_SOCKET_PATH": "", "DSTL_TOKEN_FILE": ""}) == load_settings(STORAGE, {})


@pytest.mark.parametrize("path", [path for path, setting in known_settings().items() if path != "storage"])
def test_every_setting_has_three_sources(path: str, tmp_path: Path) -> None:
    """Declaring a field is enough to set it by file, environment and command line."""
    setting = known_settings()[path]
    value = {int: 1801, float: 1.5, bool: True, str: "a", Path: "/a"}.get(setting.kind) or get_args(setting.kind)[0]
    text = str(value).lower() if setting.kind is bool else str(value)
    table = f"[{setting.group}]\n" if setting.group else ""
    config = tmp_path / "dstl.toml"
    config.write_text(f"{table}{setting.name} = {json.dumps(value)}\n", encoding="utf-8")

    found = [
        settings_sources.read_file(str(config)),
        settings_sources.read_environment({setting.variable: text}),
        settings_sources.read_command_line({path: text, "storage": None}),
    ]

    assert found == [{path: setting.parse(text, "here")}] * 3
