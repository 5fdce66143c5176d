"""What a user of the backend touches: the backend, its operators, the result and its writer."""
