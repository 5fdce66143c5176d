"""Bounds that several histograms share."""

from __future__ import annotations

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
