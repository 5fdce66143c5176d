"""The servers of `tools.servers`, which benchmarks use too, as tests import them."""

from __future__ import annotations

from tools.servers.fault_proxy import FaultProxy, Rule
from tools.servers.kafka import KafkaBroker, connector_jars
from tools.servers.maven import maven_jars
from tools.servers.programs import ServerError, ServerProcess, free_port, go_program, stack_folder
from tools.servers.s3_server import S3Server
from tools.servers.service_process import ServiceProcess
from tools.servers.toxiproxy import Toxiproxy

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
