"""The only package that uses private interfaces of Spark and pandas."""
