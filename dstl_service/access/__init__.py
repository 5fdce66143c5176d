"""Access control: tokens and roles, callers on the host, certificates, and the audit log."""
