"""What the command ``dstl`` does, by command."""
