#!/usr/bin/env bash
# Measure what is worth measuring on a GPU, in four parts of at most nine minutes each. No network.
#
#   tools/first_contact.sh FOLDER PART [--input=TEXT] [--nanogpt=FOLDER] [--tokens=FOLDER]
#   DEVICE=cpu TINY=1 tools/first_contact.sh FOLDER PART …    a rehearsal, with tiny shapes
#
# python tools/first_contact.py --help says what each part is and what the options mean.
set -eu
if [ $# -lt 2 ]; then
    sed -n '2,7s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
folder=$1 part=$2
shift 2
exec "${PYTHON:-python3}" "$(dirname "$0")/first_contact.py" "--out=$folder" "--part=$part" \
    "--device=${DEVICE:-auto}" ${TINY:+--tiny} "$@"
