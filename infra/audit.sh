#!/usr/bin/env bash
# What Floe is made of, as CycloneDX documents, and what of it is known to be vulnerable: bash infra/audit.sh [FOLDER]
# Both by the locks. Where no vulnerability database answers, the second half is skipped, and says so. With `documents`
# after the folder only the first half is made.
set -euo pipefail
cd "$(dirname "$0")/.."
tools=.venv/audit/bin out=${1:-build/audit}
mkdir -p "$out"

for lock in requirements-site requirements; do
  PYTHONWARNINGS=ignore "$tools/cyclonedx-py" requirements "$lock.lock" --pyproject pyproject.toml --output-reproducible -o "$out/$lock.cdx.json"
  echo "$out/$lock.cdx.json: $("$tools/python" -c '
import json, sys
print(len(json.load(open(sys.argv[1]))["components"]), "packages")' "$out/$lock.cdx.json")"
done
[ "${2:-}" != documents ] || exit 0

status=0
"$tools/pip-audit" --progress-spinner off --disable-pip --require-hashes -f json -r requirements.lock \
  -o "$out/vulnerabilities.json" 2>"$out/pip-audit.log" || status=$?
"$tools/python" - "$out/vulnerabilities.json" "$status" <<'END'
import json, pathlib, sys

report, status = pathlib.Path(sys.argv[1]), int(sys.argv[2])
packages = json.loads(report.read_text())["dependencies"] if report.exists() and report.stat().st_size else []
asked = [each for each in packages if "skip_reason" not in each]
if not asked:
    print("SKIPPED: vulnerabilities were not looked up, no database answers; see pip-audit.log")
    sys.exit(0)
for each in asked:
    for found in each["vulns"]:
        print(f"{each['name']} {each['version']}: {found['id']}, fixed in {', '.join(found['fix_versions']) or 'nothing'}")
print(f"{len(asked)} of {len(packages)} packages looked up")
sys.exit(status)
END
