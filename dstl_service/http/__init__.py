"""HTTP as the service speaks it: connections and their bounds, access, errors; the routes are in `routes`."""
