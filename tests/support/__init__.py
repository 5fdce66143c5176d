"""Helpers of several tests that no product needs: the order of tests, and machines with full disks or cut links."""
