#!/bin/bash
# Checks the alerts with promtool: that they parse, and that each fires where it must and only there.
# Exit code 0 also where promtool is missing, which is said aloud: Debian and Ubuntu have it in the package prometheus.
set -euo pipefail
cd "$(dirname "$0")"
if ! command -v promtool >/dev/null; then
  echo "SKIPPED: no promtool on the PATH (apt-get install prometheus): the alerts were not tried" >&2
  exit 0
fi
promtool check rules floe.rules.yml
promtool test rules floe.rules.test.yml
