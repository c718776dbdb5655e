#!/bin/bash
# Checks the alerts with promtool: that they parse, and that each fires when it must, and only then.
# Without promtool it prints a note and exits with 0. Debian and Ubuntu have it in the package prometheus.
set -euo pipefail
cd "$(dirname "$0")"
if ! command -v promtool >/dev/null; then
  echo "SKIPPED: no promtool on the PATH (apt-get install prometheus): the alerts were not tried" >&2
  exit 0
fi
promtool check rules floe.rules.yml
promtool test rules floe.rules.test.yml
