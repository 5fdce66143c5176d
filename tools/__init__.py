"""What developers of the project run and share: servers of their own, reports, pages and checks. Not installed."""
