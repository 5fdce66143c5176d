"""The servers of `loadtest.stack`, which benchmarks use too, as tests import them."""

from __future__ import annotations

from loadtest.stack.programs import ServerError, ServerProcess, free_port, go_program, stack_folder
from loadtest.stack.s3_server import S3Server

__all__ = ["S3Server", "ServerError", "ServerProcess", "free_port", "go_program", "stack_folder"]
