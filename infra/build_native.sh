#!/usr/bin/env bash
# Builds the optional compiled modules for the Python that is its argument, into a second one or else beside their C files.
# Prints a line and ends well where no compiler or no header of Python is here: Floe then does the same in Python.
set -euo pipefail
python=$1 into=${2:-}

config() { "$python" -c "import sysconfig; print($1 or '')"; }

link=$(config "sysconfig.get_config_var('LDSHARED')")
include=$(config "sysconfig.get_path('include')")
suffix=$(config "sysconfig.get_config_var('EXT_SUFFIX')")
if ! command -v "${link%% *}" >/dev/null 2>&1; then
  echo "compiled modules skipped: no C compiler here (${link%% *}); Floe runs without them"
  exit 0
fi
if [ ! -f "$include/Python.h" ]; then
  echo "compiled modules skipped: no $include/Python.h here; Floe runs without them"
  exit 0
fi
for source in common/nats/frames.c ingress/publishers/compose.c; do
  module=${into:-$(dirname "$source")}/_$(basename "$source" .c)$suffix
  digest=$("$python" -c 'import hashlib, sys; print(hashlib.sha256(open(sys.argv[1], "rb").read()).hexdigest())' "$source")
  # To another name first: a process that runs has the former file open. CFLAGS come last, so that they win.
  # shellcheck disable=SC2086
  $link -O2 -fPIC -Wall -Wextra -DSOURCE_SHA256="\"$digest\"" -I"$include" "$source" -o "$module.new" ${CFLAGS:-}
  mv "$module.new" "$module"
done
test -n "$into" || "$python" -c 'from common.cli import installed_versions; print("compiled modules in use:", installed_versions()["native"])'
