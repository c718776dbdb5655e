#!/usr/bin/env bash
# Builds the wheel of Floe into a folder (dist): bash infra/wheel.sh [FOLDER]. What builds it comes from requirements.lock,
# hashes checked; the wheel holds Python only, so it fits every machine.
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
out=$(mkdir -p "${1:-dist}" && cd "${1:-dist}" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
awk '/^[^ ]/ { keep = /^(hatchling|packaging|pathspec|pluggy|tomlkit|trove-classifiers)==/ } keep' \
  "$here/requirements.lock" >"$work/build.lock"
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check --require-hashes -r "$work/build.lock"
"$work/venv/bin/python" -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation \
  --wheel-dir "$out" "$here"
ls "$out"/floe_jetstream-*.whl
