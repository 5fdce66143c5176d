"""
Shares of the time that a stop may take.

At `ANSWERED_BY`, waiting requests get 503; at `STORED_BY`, change sets that are not durable are given up.
"""

ANSWERED_BY = 0.8
STORED_BY = 0.9
"""Shares of the time that a stop may take."""
