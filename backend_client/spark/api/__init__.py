"""The user's API: the backend, its operators, the stateful result and its writer."""
