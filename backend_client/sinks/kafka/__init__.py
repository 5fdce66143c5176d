"""The sink that publishes to topics of Kafka."""

from backend_client.sinks.packages import needed_for

with needed_for("KafkaSink", "confluent_kafka", "confluent-kafka>=2.10"):
    from backend_client.sinks.kafka.sink import KafkaSink

__all__ = ["KafkaSink"]
