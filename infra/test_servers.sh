#!/usr/bin/env bash
# Builds each nats-server of infra/local/servers.txt with `go install`, and runs the tests that depend on the server.
# The newest is the server of all these tests; the older ones run where a test names their minor version.
# Usage: infra/test_servers.sh BIN (the programs of the environment with Floe), ARGUMENTS of pytest in its place
set -euo pipefail
bin=$1
shift
tests=(tests/contract tests/integration/test_nats_versions.py tests/integration/test_restore*.py tests/integration/test_ingress_rights.py
  tests/integration/test_nats_client.py tests/integration/test_nats_kv.py tests/integration/test_egress_cluster.py
  tests/integration/test_server_limits.py tests/integration/test_ingress_messages.py)
command -v go >/dev/null 2>&1 || { echo "no go here: expected Go on the PATH, which builds the servers; see https://go.dev/doc/install" >&2; exit 1; }
mapfile -t versions < <(grep -E '^[0-9]' infra/local/servers.txt)
for version in "${versions[@]}"; do
  folder=$PWD/build/servers/$version
  if [ ! -x "$folder/nats-server" ]; then
    echo "building nats-server $version …"
    GOBIN=$folder GOFLAGS=-trimpath go install "github.com/nats-io/nats-server/v2@v$version"
  fi
  minor=${version%.*}
  export "FLOE_NATS_SERVER_${minor/./_}=$folder/nats-server"
done
echo "tests on nats-server ${versions[0]}"
FLOE_NATS_SERVER=$PWD/build/servers/${versions[0]}/nats-server exec "$bin/python" -m pytest -m "not soak" -n 4 --dist loadfile "${@:-${tests[@]}}"
