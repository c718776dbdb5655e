#!/usr/bin/env bash
# Makes floe's deb and rpm for this machine's architecture and its Python: bash infra/package.sh [FOLDER], dist by default.
# Needs `make setup` and nfpm (go install github.com/goreleaser/nfpm/v2/cmd/nfpm@v2.43.4).
# FLOE_SYSTEM_PYTHON: the interpreter of the machines it is for, /usr/bin/python3 by default.
set -euo pipefail
cd "$(dirname "$0")/.."
# The time of each file, so that the same contents make the same packages on one host.
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(date +%s)}
out=$(mkdir -p "${1:-dist}" && cd "${1:-dist}" && pwd)
nfpm=${NFPM:-nfpm}
# python3.11, not python3: that may become another version, and what is installed beside it stays.
python=$(readlink -f "${FLOE_SYSTEM_PYTHON:-/usr/bin/python3}")
FLOE_STAGE=$(mktemp -d)
trap 'rm -rf "$FLOE_STAGE"' EXIT
venv=$FLOE_STAGE/opt/floe

"$python" -m venv --without-pip "$venv"
install() { .venv/bin/python -m pip --python "$venv/bin/python" install --quiet --disable-pip-version-check --no-compile "$@"; }
install --require-hashes --only-binary :all: --no-binary nkeys -r requirements-site.lock
.venv/bin/python -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir "$FLOE_STAGE" .
install --no-deps "$FLOE_STAGE"/floe_jetstream-*.whl

# The environment is built here and runs in /opt/floe.
rm -f "$venv"/bin/[Aa]ctivate* "$venv"/lib/python*/site-packages/*.dist-info/direct_url.json
grep -rlIF "$FLOE_STAGE" "$venv/bin" "$venv/pyvenv.cfg" | xargs -r sed -i "s#$FLOE_STAGE##g"
# Without the digests of files that were changed here, or that name the place of the build.
sed -i -E '/^(\.\.\/){3}bin\/|\/direct_url\.json,/d' "$venv"/lib/python*/site-packages/*.dist-info/RECORD
set_times() { find "$FLOE_STAGE" -exec touch -h -d "@$SOURCE_DATE_EPOCH" {} +; }
set_times # also before: bytecode holds the time of its source
"$python" -m compileall -q --invalidation-mode timestamp -s "$FLOE_STAGE" -p / "$venv/lib"

# Dashboard and rules, for whoever provisions Grafana and Prometheus.
mkdir -p "$FLOE_STAGE/usr/share/floe"
cp floe.example.yaml "$FLOE_STAGE/usr/share/floe/"
for folder in infra/grafana infra/prometheus; do
  if [ -d "$folder" ]; then cp -r "$folder" "$FLOE_STAGE/usr/share/floe/"; fi
done

case $(uname -m) in
  x86_64) FLOE_ARCH=amd64 ;;
  aarch64) FLOE_ARCH=arm64 ;;
  *) echo "no packages are made for $(uname -m)" >&2; exit 1 ;;
esac
FLOE_VERSION=$("$venv/bin/python" -c 'from importlib.metadata import version; print(version("floe-jetstream"))')
FLOE_PYTHON=$("$python" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
export FLOE_STAGE FLOE_ARCH FLOE_VERSION FLOE_PYTHON
set_times
for kind in deb rpm; do
  "$nfpm" package --config infra/nfpm.yaml --packager "$kind" --target "$out/"
done
