"""The checks before a query takes its job over, and the Spark checkpoint that it must fit."""
