#!/usr/bin/env bash
# Check the prerequisites that set-up cannot install itself, and say how to get missing ones.
#
#   tools/check_prerequisites.sh python java go mvn postgres
set -euo pipefail

failed=0

missing() { # the fault, then the remedy, one line each
    failed=1
    printf 'Missing: %s\n' "$1" >&2
    shift
    printf '    %s\n' "$@" >&2
}

version_of() { # the first number of a version: 17 of 'openjdk version "17.0.15"'
    sed -nE "s/$1/\1/p" | head -n 1
}

check_python() {
    local python
    python=${PYTHON:-$(dirname "$0")/find_python.sh}
    [ -n "${PYTHON:-}" ] || python=$("$python")
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        missing "Python 3.11 or newer (found: $("$python" --version 2>/dev/null || echo none))" \
            "Debian, Ubuntu:  apt-get install python3 python3-venv" \
            "macOS:           brew install python@3.12" \
            "Or name one:     make setup PYTHON=/path/to/python3.12"
    elif ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        missing "the venv module of $("$python" --version)" \
            "Debian, Ubuntu:  apt-get install python3-venv"
    fi
}

check_java() { # the one that Spark takes
    local java=java version
    [ -z "${JAVA_HOME:-}" ] || java=$JAVA_HOME/bin/java
    version=$("$java" -version 2>&1 | version_of '.* version "([0-9]+).*' || true)
    if [ "${version:-0}" -lt 17 ]; then
        missing "Java 17 or newer, for Spark (found: ${version:-none}, looked for: $java)" \
            "Debian, Ubuntu:  apt-get install openjdk-17-jre-headless" \
            "macOS:           brew install openjdk@17" \
            "Elsewhere:       unpack a JDK 17 and set JAVA_HOME to its folder"
    fi
}

check_go() { # older ones cannot fetch the Go version that the S3 server's module names
    local version
    version=$(go version 2>/dev/null | version_of '.*go1\.([0-9]+).*' || true)
    if [ "${version:-0}" -lt 21 ]; then
        missing "Go 1.21 or newer, for the tests: they build an S3 server (found: ${version:+1.}${version:-none})" \
            "Debian, Ubuntu:  apt-get install golang-go, where that is new enough" \
            "macOS:           brew install go" \
            "Elsewhere:       the archive from go.dev, unpacked, its bin folder on the path"
    fi
}

check_mvn() { # any that runs on this Java
    if ! mvn -version >/dev/null 2>&1; then
        missing "Maven, for the tests: it fetches a Kafka broker and Spark's Kafka connector (mvn does not run)" \
            "Debian, Ubuntu:  apt-get install maven" \
            "macOS:           brew install maven" \
            "Elsewhere:       Apache Maven's binary archive, unpacked, its bin folder on the path"
    fi
}

check_postgres() { # where tools/servers/postgres.py looks for it
    if ! compgen -G "/usr/lib/postgresql/*/bin/postgres" >/dev/null && ! command -v postgres >/dev/null; then
        missing "PostgreSQL's server (no 'postgres' in /usr/lib/postgresql or on the path)" \
            "Debian, Ubuntu:  apt-get install postgresql" \
            "macOS:           brew install postgresql@16"
    fi
}

for what in "$@"; do
    "check_$what"
done
if [ "$failed" -ne 0 ]; then
    echo "Then run make again." >&2
    exit 1
fi
