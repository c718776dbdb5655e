#!/usr/bin/env bash
# Checks what deployments are made of, with the tools that read it in earnest. What is not here is skipped, aloud.
set -uo pipefail
cd "$(dirname "$0")/.."
python=$PWD/.venv/bin/python
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0
skipped=0

# name, then a command: its output is shown where it fails.
check() {
  local name=$1
  shift
  if "$@" >"$work/output" 2>&1; then
    echo "ok       $name"
  else
    echo "FAILED   $name"
    sed 's/^/         /' "$work/output"
    failed=$((failed + 1))
  fi
}

skip() {
  echo "skipped: $1"
  skipped=$((skipped + 1))
}

# What `go install` makes is found there too.
export PATH="$PATH:${GOBIN:-${GOPATH:-$HOME/go}/bin}"

compose() {
  "$python" -m venv "$work/jsonschema" &&
    "$work/jsonschema/bin/pip" install --quiet --disable-pip-version-check --require-hashes -r tests/deploy/jsonschema.lock &&
    "$python" -c 'import json, sys, yaml; json.dump(yaml.safe_load(open("infra/compose.yaml")), sys.stdout)' >"$work/compose.json" &&
    "$work/jsonschema/bin/python" - "$work/compose.json" <<'END'
import json, sys
from jsonschema import Draft7Validator

schema = json.load(open("tests/deploy/compose-spec.json"))
Draft7Validator.check_schema(schema)
problems = list(Draft7Validator(schema).iter_errors(json.load(open(sys.argv[1]))))
for problem in problems:
    print(f"{problem.json_path}: {problem.message}")
sys.exit(bool(problems))
END
}
check "compose.yaml against the schema of the Compose Specification" compose
# The plugin is another program than docker, and needs no daemon for this.
if docker compose version >/dev/null 2>&1; then
  touch "$work/s3-secret"
  check "docker compose config" docker compose -f infra/compose.yaml config --quiet
else
  skip "docker compose is not here (the schema was checked)"
fi

all=(--set ingress.enabled=true --set compaction.enabled=true --set serviceMonitor.enabled=true)
all+=(--set compaction.executors=true --set compare.enabled=true)

rendered() {
  helm template floe infra/helm/floe "$@" >"$work/rendered.yaml" && cat "$work/rendered.yaml" >>"$work/every.yaml" &&
    "$python" - "$work/rendered.yaml" "$work" <<'END'
import subprocess, sys, yaml

documents = [each for each in yaml.safe_load_all(open(sys.argv[1])) if each]
names = [(each["kind"], each["metadata"]["name"]) for each in documents]
assert len(set(names)) == len(names), names
for each in documents:
    for name, text in (each.get("data") or {}).items():
        path = f"{sys.argv[2]}/{name}"
        open(path, "w").write(text.replace("/etc/floe/credentials", sys.argv[2]))
        open(f"{sys.argv[2]}/s3-secret", "w").write("secret")
        subprocess.run([sys.executable, "-m", "floe", "config", "check", "-c", path], check=True)
print(names)
END
}
without_budget() { rendered "$@" && ! grep -q PodDisruptionBudget "$work/rendered.yaml"; }
# By a tool that carries the schemas of each version of Kubernetes. A kind without a schema fails.
kubernetes() {
  "$python" -m venv "$work/kubernetes" &&
    "$work/kubernetes/bin/pip" install --quiet --disable-pip-version-check --require-hashes -r tests/deploy/kubernetes.lock &&
    "$work/kubernetes/bin/python" - "$work/every.yaml" <<'END'
import json, sys
import kubernetes_validate, yaml
from jsonschema import Draft7Validator

monitors = Draft7Validator(json.load(open("tests/deploy/servicemonitor.json")))
oldest = yaml.safe_load(open("infra/helm/floe/Chart.yaml"))["kubeVersion"].strip(">=").split("-")[0]
for each in filter(None, yaml.safe_load_all(open(sys.argv[1]))):
    if each["kind"] == "ServiceMonitor":
        monitors.validate(each)
    else:
        for version in (oldest, kubernetes_validate.latest_version()):
            kubernetes_validate.validate(each, version, strict=True)
END
}
refused() { ! helm template floe infra/helm/floe "$@"; }
if command -v helm >/dev/null; then
  check "helm lint" helm lint --strict infra/helm/floe "${all[@]}"
  check "helm template: as it is" rendered
  check "helm template: all of it" rendered "${all[@]}"
  check "helm template: every value" rendered -f tests/deploy/every-value.yaml
  check "helm template: no credentials, no account" rendered --set existingSecret= --set serviceAccount.create=false
  check "helm template: a single pod has no disruption budget" without_budget --set egress.replicas=1
  check "helm template: a value that the schema does not know is refused" refused --set egress.replica=3
  check "all of it, strictly, against the schemas of the oldest and the newest Kubernetes" kubernetes
else
  skip "helm is not here (go install helm.sh/helm/v4/cmd/helm@latest)"
fi

if command -v promtool >/dev/null; then
  check "promtool: alerts parse, and fire where they must and only there" bash infra/prometheus/check.sh
else
  skip "promtool is not here (apt-get install prometheus): the alerts were not tried"
fi

units() {
  # The program is not installed on the machine that checks; any other one stands for it.
  for unit in infra/systemd/*.service infra/systemd/*.timer; do
    sed 's#/opt/floe/bin/floe#/bin/true#' "$unit" >"$work/$(basename "$unit")" || return
  done
  mv "$work/floe-egress@.service" "$work/floe-egress@site.service"
  # A value that is not understood is a word only, and the exit code 0. Other units of this machine are no affair of ours.
  systemd-analyze verify --man=no "$work"/floe-*.service "$work"/floe-*.timer 2>&1 | tee "$work/words"
  [ "${PIPESTATUS[0]}" = 0 ] && ! grep -q floe "$work/words"
}
hardened() {
  systemd-analyze security --offline=true --threshold=20 "$work"/floe-*.service
}
if command -v systemd-analyze >/dev/null; then
  check "systemd-analyze verify" units
  # An older systemd cannot look at a file.
  if systemd-analyze --help | grep -q -- --offline; then check "systemd-analyze security: exposure at most 2.0" hardened; fi
else
  skip "systemd-analyze is not here (apt-get install systemd)"
fi

packages() { bash infra/package.sh "$work/packages"; }
# The package as it is unpacked, at the place where it belongs, in a room of its own.
unpacked() {
  dpkg-deb -x "$work"/packages/floe_*.deb "$work/root" || return
  unshare --mount sh -ec '
    mount --make-rprivate /
    mount -t tmpfs tmpfs /opt
    mkdir /opt/floe
    mount --bind "$1/opt/floe" /opt/floe
    setpriv --reuid 65534 --regid 65534 --clear-groups --bounding-set=-all --no-new-privs /opt/floe/bin/floe --version
    for module in egress.service ingress.service compaction.run; do
      setpriv --reuid 65534 --regid 65534 --clear-groups /opt/floe/bin/python -I -c "import $module"
    done
  ' sh "$work/root"
}
if ! command -v nfpm >/dev/null; then
  skip "nfpm is not here (go install github.com/goreleaser/nfpm/v2/cmd/nfpm@v2.43.4)"
elif ! /usr/bin/python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
  skip "packages: /usr/bin/python3 is not there, or older than 3.11"
else
  check "nfpm: deb and rpm" packages
  if ! ls "$work"/packages/floe_*.deb >/dev/null 2>&1; then
    skip "the deb was not unpacked and run: there is none"
  elif [ "$(id -u)" = 0 ] && command -v dpkg-deb >/dev/null && unshare --mount true 2>/dev/null; then
    chmod 755 "$work"
    check "the deb, unpacked, runs as an unprivileged user" unpacked
  else
    skip "the deb was not unpacked and run (that wants root, dpkg-deb and unshare)"
  fi
fi

for script in infra/spark/*.sh; do check "$script is bash" bash -n "$script"; done
check "the environment for Spark's executors, made and moved" bash infra/spark/environment.sh "$work/environment.tar.gz"

if docker info >/dev/null 2>&1; then
  check "docker build: site" docker build --quiet -f infra/docker/Dockerfile --target site -t floe:site .
  check "docker build: spark" docker build --quiet -f infra/docker/Dockerfile --target spark -t floe:spark .
  check "docker build: cluster" docker build --quiet --build-arg BASE=floe:spark -t floe:cluster infra/spark
else
  skip "no docker daemon: the images were not built and no container was run"
fi

echo "$failed failed, $skipped skipped"
exit $((failed > 0))
