#!/usr/bin/env bash
# Print the first Python on the path that is new enough for this project, or "python3" where none is.
set -euo pipefail

for name in python3 python3.13 python3.12 python3.11; do
    if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        echo "$name"
        exit
    fi
done
echo python3
