"""Groups of cases whose attack is the content of a request."""
