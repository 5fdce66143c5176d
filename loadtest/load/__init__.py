"""The load test of the service: locust users that behave like hosts with slots; see docs/load-testing.md."""
