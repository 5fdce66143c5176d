"""The servers of `loadtest.stack`, which benchmarks use too, as tests import them."""

from __future__ import annotations

from loadtest.stack.fault_proxy import FaultProxy, Rule
from loadtest.stack.programs import ServerError, ServerProcess, free_port, go_program, stack_folder
from loadtest.stack.s3_server import S3Server
from loadtest.stack.service_process import ServiceProcess
from loadtest.stack.toxiproxy import Toxiproxy

__all__ = [
    "FaultProxy",
    "Rule",
    "S3Server",
    "ServerError",
    "ServerProcess",
    "ServiceProcess",
    "Toxiproxy",
    "free_port",
    "go_program",
    "stack_folder",
]
