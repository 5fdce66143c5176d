"""What runs on the driver for each batch of a query."""
