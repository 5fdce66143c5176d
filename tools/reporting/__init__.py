"""Reports of measured figures, for machines and for people. Owns no measurement."""
