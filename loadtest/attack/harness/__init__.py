"""A case and its verdict, the attacked services, and the attacker's means: raw requests, a job, another user."""
