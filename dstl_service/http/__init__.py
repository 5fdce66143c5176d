"""The service's HTTP layer: connections and their bounds, access, errors; routes are in `routes`."""
