#!/usr/bin/env bash
# Measure what is worth measuring on a GPU, in four parts of at most nine minutes each. No network.
#
#   tools/first_contact.sh FOLDER PART [--input=TEXT] [--nanogpt=FOLDER] [--tokens=FOLDER]
#   PYTHON=/path/to/python tools/first_contact.sh FOLDER PART …
#       by default the project's .venv/bin/python where that has torch, otherwise python3
#   DEVICE=cpu TINY=1 tools/first_contact.sh FOLDER PART …    a rehearsal, with tiny shapes
#
# tools/first_contact.py --help says what each part is and what the options mean.
set -eu
if [ $# -lt 2 ]; then
    sed -n '2,9s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
has_torch() {
    "$1" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)' \
        2> /dev/null
}
tools=$(dirname "$0") python=${PYTHON:-}
if [ -z "$python" ]; then
    python=$tools/../.venv/bin/python
    has_torch "$python" || python=python3
fi
if ! has_torch "$python"; then
    echo "error: $python has no torch: name a Python that has it, as PYTHON=/path/to/python" >&2
    exit 2
fi
folder=$1 part=$2
shift 2
exec "$python" "$tools/first_contact.py" "--out=$folder" "--part=$part" \
    "--device=${DEVICE:-auto}" ${TINY:+--tiny} "$@"
