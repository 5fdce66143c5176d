"""HTTP routes, one module for each thing that they serve: parse, call the service, reply."""
