#!/usr/bin/env bash
# Makes the Python environment that a job of Spark ships to its executors: bash infra/spark/environment.sh [FILE], by default
# dist/environment.tar.gz. It holds Floe and what requirements-site.lock names, hashes checked; PySpark is not in it, because
# it comes with the executors' Spark. They need the interpreter of FLOE_PYTHON (python3) at the place where it is here.
#
#   spark.archives: "/srv/floe/environment.tar.gz#environment"
#   spark.pyspark.python: ./environment/bin/python
set -euo pipefail
cd "$(dirname "$0")/../.."
out=$(realpath -m "${1:-dist/environment.tar.gz}")
case $out in
  *.tar.gz | *.tgz) ;;
  *) echo "$out: expected a name that ends with .tar.gz: Spark unpacks a .tar without the right to execute" >&2; exit 2 ;;
esac
python=${FLOE_PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$python" -m venv "$work/tools"
"$python" -m venv --without-pip "$work/environment"
install() {
  "$work/tools/bin/python" -m pip --python "$work/environment/bin/python" install --quiet --disable-pip-version-check "$@"
}
install --require-hashes --only-binary :all: --no-binary nkeys -r requirements-site.lock
PYTHON=$python bash infra/wheel.sh "$work/wheel" >/dev/null
install --no-deps "$work"/wheel/floe_jetstream-*.whl

# Programs in bin name the folder that they were made in; nobody calls them there.
mkdir -p "$(dirname "$out")"
(cd "$work/environment" && tar -czf "$work/new.tar.gz" --exclude 'pyarrow/include' --exclude 'pyarrow/tests' bin/python* lib pyvenv.cfg)
mkdir "$work/moved"
tar -xzf "$work/new.tar.gz" -C "$work/moved"
(cd "$work/moved" && env -u PYTHONPATH ./bin/python -c 'import compaction.run, compaction.spark')
mv "$work/new.tar.gz" "$out"
echo "$out"
