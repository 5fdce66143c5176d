"""
compose/ compared with the reference of the Compose specification, and with the programs that it names.

The reference is compose-go, on which Docker's own `compose` is based: it validates by the specification's JSON schema,
checks references, and returns the resolved model that the tests below check. No container engine is needed.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from backend_client.settings import BackendSettings
from dstl_service.commands.arguments import parser
from dstl_service.commands.common import settings_of
from dstl_service.intake.change_sets import BatchSettings
from dstl_service.settings import CacheSettings
from dstl_service.uploads.settings import UploadSettings
from examples import cluster_totals
from tools.servers.spark.cluster import master_command, worker_command
from tools.servers.versions import VERSITYGW_VERSION

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "compose"
SERVICES = {"s3", "coordinator", "spark-master", "worker-1", "sidecar-1", "worker-2", "sidecar-2", "driver"}


Load = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """Build the reference, and return a function that reads a compose file without variables of this machine."""
    program = tmp_path_factory.mktemp("checker") / "checker"
    source = Path(__file__).with_name("checker")
    subprocess.run(["go", "build", "-o", str(program), "."], cwd=source, check=True, capture_output=True, text=True)

    def run(path: Path, **variables: str) -> subprocess.CompletedProcess[str]:
        ours = ("DSTL_", "COMPOSE_")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        command = [str(program), str(path)]
        return subprocess.run(command, env={**environment, **variables}, capture_output=True, text=True, check=False)

    return run


@pytest.fixture(scope="module")
def services(load: Load) -> dict[str, Any]:
    """Return the services of the resolved project."""
    result = load(FOLDER / "compose.yaml")
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)["services"]
    return found


class TestSpecification:
    """The file complies with the Compose specification."""

    def test_file_is_valid(self, services: dict[str, Any]) -> None:
        """The reference accepts the file, which has exactly the parts of the stack."""
        assert set(services) == SERVICES

    @pytest.mark.parametrize(
        ("old", "new", "message"),
        [
            ("    interval: 5s", "    intervall: 5s", "intervall"),
            ("  restart: unless-stopped", "  restart: [1]", "restart"),
            ("      spark-master:\n        condition", "      nobody:\n        condition", "nobody"),
            ("      - s3-data:/data", "      - nowhere:/data", "nowhere"),
            ("      - dstl_token\n", "      - other\n", "other"),
        ],
    )
    def test_mistakes_are_found(self, load: Load, tmp_path: Path, old: str, new: str, message: str) -> None:
        """The check finds an unknown key, a wrong type and missing names, so it can fail."""
        text = (FOLDER / "compose.yaml").read_text(encoding="utf-8")
        assert old in text
        (tmp_path / "compose.yaml").write_text(text.replace(old, new), encoding="utf-8")

        result = load(tmp_path / "compose.yaml")

        assert result.returncode != 0
        assert message in result.stderr

    def test_all_have_health_checks(self, services: dict[str, Any]) -> None:
        """Each server reports when it is ready, and its dependents wait for that."""
        assert {name for name, service in services.items() if "healthcheck" not in service} == {"driver"}
        needs = [need for service in services.values() for need in service.get("depends_on", {}).values()]
        assert needs
        assert all(need["condition"] == "service_healthy" for need in needs)

    def test_workers_and_sidecars_are_alike(self, services: dict[str, Any]) -> None:
        """The second pair is the first with another number."""
        for name in ("worker", "sidecar"):
            one, two = (
                re.sub(rf"(worker|sidecar|socket|local)-{number}", r"\1-#", json.dumps(services[f"{name}-{number}"]))
                for number in (1, 2)
            )
            assert one == two


class TestPrograms:
    """Programs that the file starts exist and accept their arguments."""

    @pytest.mark.parametrize("name", ["coordinator", "sidecar-1", "sidecar-2"])
    def test_service_starts_with_its_settings(
        self, services: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """`dstl` accepts command line and environment, and the settings are as the file intends."""
        for variable, value in {**services[name]["environment"], "DSTL_CACHE_BYTES_MAX": "12345"}.items():
            monkeypatch.setenv(variable, value)

        settings = settings_of(parser().parse_args(services[name]["command"]))

        assert settings.storage == "s3://state/dstl"
        assert settings.cache.bytes_max == 12_345
        assert settings.upload.timeout_ms == UploadSettings().timeout_ms
        assert settings.batch.in_flight_bytes_max == BatchSettings().in_flight_bytes_max
        assert services[name]["environment"]["DSTL_CACHE_BYTES_MAX"] == str(CacheSettings().bytes_max)
        if name == "coordinator":
            assert (settings.host, settings.port) == ("0.0.0.0", 7071)
            assert settings.advertised_url == "http://coordinator:7071"
            assert str(settings.token_file) == services[name]["secrets"][0]["target"]
        else:
            assert str(settings.socket_path) == "/run/dstl/dstl.sock"
            assert settings.host_id == name.replace("sidecar", "worker")

    def test_sidecar_and_worker_share_socket_and_tables(self, services: dict[str, Any]) -> None:
        """A worker's executors find only their own sidecar's socket, and that sidecar finds their tables."""
        for number in (1, 2):
            sidecar, worker = services[f"sidecar-{number}"], services[f"worker-{number}"]
            shared = {volume["source"]: volume["target"] for volume in sidecar["volumes"]}
            assert shared == {f"socket-{number}": "/run/dstl", f"local-{number}": "/var/lib/dstl"}
            assert worker["environment"]["DSTL_LOCAL_DIR"].startswith("/var/lib/dstl/")
            assert sidecar["environment"]["DSTL_MATERIALIZATION_ROOT"] == worker["environment"]["DSTL_LOCAL_DIR"]
            assert shared.items() <= {volume["source"]: volume["target"] for volume in worker["volumes"]}.items()
            socket = sidecar["command"][sidecar["command"].index("serve") + 2].partition("=")[2]
            assert worker["environment"]["DSTL_SERVICE"] == f"unix://{socket}"
            assert socket in " ".join(sidecar["healthcheck"]["test"])

    def test_spark_commands_are_those_of_stack(self, services: dict[str, Any]) -> None:
        """Master and workers are started like those of `make stack`, which are tested."""
        assert services["spark-master"]["command"] == master_command("spark-master", 7077, 8080)
        for name in ("worker-1", "worker-2"):
            master = "spark://spark-master:7077"
            expected = worker_command(name, 1, "1g", 8081, "/var/lib/dstl/work", master)
            assert services[name]["command"] == expected

    def test_driver_runs_example(self, services: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        """The driver's command runs the example job, which accepts its arguments."""
        command = services["driver"]["command"]
        seen: list[Any] = []
        monkeypatch.setattr(cluster_totals, "run", lambda _spark, *arguments: seen.append(arguments))
        monkeypatch.setattr(cluster_totals, "_session", lambda options: _Nothing(seen, options))

        assert command[:3] == ["python", "-m", "examples.cluster_totals"]
        assert cluster_totals.main(command[3:]) == 0
        assert seen[1][0] == "s3://state/dstl"

    def test_variables_are_known(self, services: dict[str, Any]) -> None:
        """Every DSTL_ variable of a container is documented."""
        documents = [path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")]
        known = set(re.findall(r"\bDSTL_[A-Z0-9_]+\b", " ".join(documents)))
        given = {name for service in services.values() for name in service.get("environment") or {}}

        assert {name for name in given if name.startswith("DSTL_")} - known == set()
        for name in ("worker-1", "driver"):
            address = services[name]["environment"]["DSTL_SERVICE"]
            assert BackendSettings("s3://state/dstl", "job", service=address).host_service == address

    def test_images_exist(self, services: dict[str, Any]) -> None:
        """The project's images are stages of the Dockerfile, which copies existing files; the other image is pinned."""
        lines = (FOLDER / "Dockerfile").read_text(encoding="utf-8").splitlines()
        stages = {line.rsplit(" ", 1)[1] for line in lines if line.startswith("FROM ")}
        copied = [part for line in lines if line.startswith("COPY ") for part in shlex.split(line)[1:-1]]
        admitted = (FOLDER / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
        for name, service in services.items():
            if "build" in service:
                assert service["build"]["target"] in stages, name
                assert Path(service["build"]["context"], service["build"]["dockerfile"]) == FOLDER / "Dockerfile"
            else:
                assert service["image"].endswith(f":{VERSITYGW_VERSION}"), name

        assert copied
        assert all((ROOT / part).exists() for part in copied)
        assert {f"!{part}" for part in copied} == {line for line in admitted if line.startswith("!")}

    def test_images_have_one_user(self) -> None:
        """A sidecar accepts snapshots of its own user only, so both images run as the user that their base creates."""
        base, *stages = re.split(r"^FROM ", (FOLDER / "Dockerfile").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]

        assert re.search(r"useradd --uid \d+ .*\bdstl\b", base)
        assert re.search(r"install .*-o dstl .*/var/lib/dstl", base)
        assert [re.findall(r"^USER (.*)$", stage, re.MULTILINE) for stage in stages] == [["dstl"], ["dstl"]]

    def test_health_checks_are_programs(self, services: dict[str, Any]) -> None:
        """Python health checks are valid programs; the S3 server's requests the path that the server answers."""
        for name, service in services.items():
            test = service.get("healthcheck", {}).get("test", [])
            if test[1:3] == ["python", "-c"]:
                compile(test[3], name, "exec")
        assert services["s3"]["healthcheck"]["test"][-1].endswith(services["s3"]["environment"]["VGW_HEALTH"])


class TestHardening:
    """A compromised container is of little use."""

    def test_containers_have_no_rights_and_limits(self, services: dict[str, Any]) -> None:
        """No container writes its root, has or gains a privilege, or uses all memory; it writes to volumes only."""
        for name, service in services.items():
            assert service["read_only"] is True, name
            assert service["cap_drop"] == ["ALL"], name
            assert service["security_opt"] == ["no-new-privileges:true"], name
            assert int(service["mem_limit"]) > 0, name
            assert service["pids_limit"] > 0, name
            assert not service.get("privileged")
            assert [mount.partition(":")[0] for mount in service["tmpfs"]] == ["/tmp"]

    def test_service_image_has_only_what_the_service_needs(self) -> None:
        """Its requirements are pinned like all others, and contain neither Spark nor a test tool."""
        stages = (FOLDER / "Dockerfile").read_text(encoding="utf-8").split("\nFROM ")
        stage = next(text for text in stages if text.startswith("base AS service"))
        service, everything = (
            # Without the markers: other requirements may need a package on more platforms.
            [line.partition(" ;")[0].rstrip(" \\") for line in (ROOT / name).read_text(encoding="utf-8").splitlines()]
            for name in ("requirements-service.txt", "requirements.txt")
        )
        pins = {line.partition("==")[0] for line in service if "==" in line}

        assert set(service) <= set(everything)
        assert {"fastapi", "uvicorn", "boto3", "xxhash"} <= pins
        assert not pins & {"pyspark", "pytest", "moto", "locust", "hypothesis", "tornado"}
        assert "requirements.txt" not in stage
        assert [line for line in stage.splitlines() if line.startswith("COPY ")] == [
            "COPY requirements-service.txt ./",
            "COPY LICENSE ./",
            "COPY storage storage",
            "COPY dstl_service dstl_service",
        ]


class TestSecrets:
    """The file has only defaults for a developer's machine, and exposes nothing to other machines."""

    def test_secrets_come_from_outside(self, load: Load) -> None:
        """Every secret can be set from outside, and the file's own values name themselves as for development."""
        outside = {"DSTL_S3_ACCESS_KEY": "A-KEY", "DSTL_S3_SECRET_KEY": "A-SECRET", "DSTL_TOKEN_FILE": "/a/token"}
        inside, given = (load(FOLDER / "compose.yaml", **variables) for variables in ({}, outside))

        assert "dstl-dev-secret" in inside.stdout
        assert "dstl-dev" not in given.stdout
        assert json.loads(given.stdout)["secrets"]["dstl_token"]["file"] == "/a/token"
        assert "/compose/dev.token" in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()

    def test_ports_are_on_loopback(self, services: dict[str, Any]) -> None:
        """Published ports can be reached from this machine only."""
        ports = [port for service in services.values() for port in service.get("ports", [])]

        assert ports
        assert all(port["host_ip"] == "127.0.0.1" for port in ports)

    def test_token_is_no_variable(self, services: dict[str, Any]) -> None:
        """The token is a file in the containers that need it, and in no environment that an inspection would show."""
        assert {name for name, service in services.items() if service.get("secrets")} == {"coordinator", "driver"}
        assert not any("DSTL_TOKEN" in (service.get("environment") or {}) for service in services.values())


class _Nothing:
    """Replaces a session: only the requested settings are kept."""

    def __init__(self, seen: list[Any], options: Any) -> None:
        seen.append(options)

    def stop(self) -> None:
        pass
