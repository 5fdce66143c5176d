"""
How the time that a stop may take is shared.

At `ANSWERED_BY` requests that still wait are told to ask again; at `STORED_BY` what could not be stored is given up.
"""

ANSWERED_BY = 0.8
STORED_BY = 0.9
"""Shares of the time that a stop may take."""
