"""
Sends valid and invalid requests by the OpenAPI document: Schemathesis against a real service process.

Every route of the document is tried, with a job that exists and with generated names. It fails when an answer is a 5xx,
takes too long, differs from the document, accepts an invalid request, or accepts one without the token. The data are
the same in every run; ``--max-examples`` sets how many.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from backend_client.service.client import ServiceClient
from tools.fuzz_hooks import JOB
from tools.servers.service.job_driver import JobDriver

TOKEN = "token-of-the-fuzz-test"  # noqa: S105 - of a service that lives for a minute
# A well-formed request may still be refused for its content, such as a range that ends before it begins.
EXCLUDED_CHECKS = "positive_data_acceptance"
_REQUEST_TIMEOUT_S = 30


@contextmanager
def running_service(folder: Path) -> Iterator[str]:
    """Run a service process with one job and one checkpoint; yield its address."""
    token_file = folder / "token"
    token_file.write_text(TOKEN, encoding="utf-8")
    command = [sys.executable, "-m", "dstl_service", "serve", "--storage", (folder / "storage").as_uri()]
    # Peers that a request names do not exist; a short timeout shows that sooner.
    command += ["--token-file", str(token_file), "--set", "checkpoint_timeout_s=10"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
        try:
            assert process.stdout is not None
            address = process.stdout.readline().decode().split()[-1]
            _make_checkpoint(address)
            yield address
        finally:
            process.terminate()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


def fuzz(address: str, folder: Path, max_examples: int) -> int:
    """Run Schemathesis; return its exit code."""
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{address}/openapi.json"]
    command += ["--header", f"Authorization: Bearer {TOKEN}", "--request-timeout", str(_REQUEST_TIMEOUT_S)]
    command += ["--checks", "all", "--exclude-checks", EXCLUDED_CHECKS, "--continue-on-failure", "--warnings", "off"]
    command += ["--max-examples", str(max_examples), "--generation-deterministic", "--no-shrink"]
    path = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, "SCHEMATHESIS_HOOKS": "tools.fuzz_hooks", "PYTHONPATH": path}
    return subprocess.run(command, check=False, cwd=folder, env=environment).returncode


def _make_checkpoint(address: str) -> None:
    client = ServiceClient(address, TOKEN, patience_s=30)
    job = JobDriver(client, JOB, operator="operator")
    job.complete([job.append(b"changes")], uid="first")
    client.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Start a service, fuzz it, stop it; return 0 if no defect was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-examples", type=int, default=20, help="per route and phase (default %(default)s)")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="fuzz") as name, running_service(Path(name)) as address:
        code = fuzz(address, Path(name), options.max_examples)
        if code != 0:
            print(f"--- the service's log ends:\n{(Path(name) / 'log').read_text(encoding='utf-8')[-4000:]}")
    return code


if __name__ == "__main__":
    sys.exit(main())
