"""HTTP routes, one module per resource: parse, call the service, reply."""
