"""The PySpark side: everything that imports pyspark, and nothing else."""
