"""Who may do what: tokens and their roles, callers on the host, certificates, and the audit log."""
