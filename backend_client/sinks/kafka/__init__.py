"""The sink that publishes to topics of Kafka."""

from backend_client.sinks.kafka.sink import KafkaSink

__all__ = ["KafkaSink"]
