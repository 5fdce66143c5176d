"""What is told to the systems that a query reads from: the offsets behind its checkpoints, as a consumer group's."""
