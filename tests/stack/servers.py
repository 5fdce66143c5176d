"""The servers of `loadtest.stack`, which benchmarks use too, as tests import them."""

from __future__ import annotations

from loadtest.stack.fault_proxy import FaultProxy, Rule
from loadtest.stack.kafka import KafkaBroker, connector_jars
from loadtest.stack.maven import maven_jars
from loadtest.stack.programs import ServerError, ServerProcess, free_port, go_program, stack_folder
from loadtest.stack.s3_server import S3Server
from loadtest.stack.service_process import ServiceProcess
from loadtest.stack.toxiproxy import Toxiproxy

__all__ = [
    "FaultProxy",
    "KafkaBroker",
    "Rule",
    "S3Server",
    "ServerError",
    "ServerProcess",
    "ServiceProcess",
    "Toxiproxy",
    "connector_jars",
    "free_port",
    "go_program",
    "maven_jars",
    "stack_folder",
]
