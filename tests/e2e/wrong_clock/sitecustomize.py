"""Python runs this at its start: a sidecar gets the wall clock set by the test, other processes keep theirs."""

import os
import sys
from pathlib import Path

if "dstl_service" in sys.orig_argv and "DSTL_TEST_CLOCK" in os.environ:
    from loadtest.chaos.jumping_clock import install

    install(Path(os.environ["DSTL_TEST_CLOCK"]))
