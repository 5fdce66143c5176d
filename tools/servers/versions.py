"""The versions of all servers that tests start, in one place."""

VERSITYGW_MODULE = "github.com/versity/versitygw/cmd/versitygw"
VERSITYGW_VERSION = "v1.8.0"

TOXIPROXY_MODULE = "github.com/Shopify/toxiproxy/v2/cmd/server"
TOXIPROXY_VERSION = "v2.12.0"

S3_FILE_SYSTEM = "org.apache.hadoop:hadoop-aws:3.5.0"
"""Hadoop's S3A, of the version of the Hadoop client that PySpark 4.3 has; 690 MB with its dependencies."""

YARN_VERSION = "3.5.0"
"""That of the Hadoop client that PySpark 4.3 has."""
YARN = f"org.apache.hadoop:hadoop-client-minicluster:{YARN_VERSION}"
YARN_LIBRARIES = ("org.bouncycastle:bcpkix-jdk18on:1.82",)

KAFKA_VERSION = "4.3.1"
KAFKA_BROKER = (f"org.apache.kafka:kafka_2.13:{KAFKA_VERSION}", "org.slf4j:slf4j-simple:1.7.36")
KAFKA_CONNECTORS = {
    # The newest published connector also runs on the next Spark; users take the one of their Spark version.
    version: (
        f"org.apache.spark:spark-sql-kafka-0-10_2.13:{connector}",
        "org.apache.spark:spark-token-provider-kafka-0-10_2.13:4.0.0",
        "org.apache.kafka:kafka-clients:3.9.1",
        "org.apache.commons:commons-pool2:2.12.1",
    )
    for version, connector in {"4.1": "4.1.2", "4.2": "4.2.0", "4.3": "4.2.0"}.items()
}
"""By the version of Spark."""
