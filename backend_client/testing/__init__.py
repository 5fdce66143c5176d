"""Support for users' unit tests: `StateTester` runs a ``StatefulProcessor`` without Spark, on real tables."""

from __future__ import annotations

from backend_client.testing.state_tester import StateTester

__all__ = ["StateTester"]
