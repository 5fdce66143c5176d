"""The PySpark side: all modules that import pyspark, and only those."""
