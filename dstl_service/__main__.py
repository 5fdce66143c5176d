"""Entry point: ``python -m dstl_service`` runs ``dstl``."""

import sys

from dstl_service.entry import main

if __name__ == "__main__":
    sys.exit(main())
