"""The subcommands of ``dstl``."""
