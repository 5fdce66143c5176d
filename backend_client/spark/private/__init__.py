"""The one place that reaches behind the public interfaces of Spark and pandas."""
