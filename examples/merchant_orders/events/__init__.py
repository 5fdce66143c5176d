"""Change events before they are in Kafka: read from PostgreSQL, written in two forms, and made dirty."""
