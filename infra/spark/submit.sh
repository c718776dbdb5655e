#!/usr/bin/env bash
# Runs a command of floe by spark-submit: by the Spark of SPARK_HOME with its settings, in place of PySpark's own.
#
#   SPARK_HOME=/opt/spark bash infra/spark/submit.sh spark://spark.example.net:7077 compact -c /etc/floe/central.yaml
#
# FLOE_PYTHON: the Python that floe-jetstream is installed for (python3). FLOE_SUBMIT: further options of spark-submit, such
# as "--driver-memory 2g --properties-file /etc/floe/spark.conf". Secrets belong into a file: every user of the host may
# read a command line.
set -euo pipefail
if [ $# -lt 2 ]; then
  echo "expected a master and a command of floe: bash $0 spark://HOST:7077 compact -c FILE" >&2
  exit 2
fi
master=$1
shift
python=${FLOE_PYTHON:-python3}
program=$("$python" -c 'import importlib.util; print(importlib.util.find_spec("floe").origin)') || {
  echo "$python: expected floe-jetstream, found none; FLOE_PYTHON names the Python that has it" >&2
  exit 78
}
submit=spark-submit
[ -z "${SPARK_HOME:-}" ] || submit=$SPARK_HOME/bin/spark-submit
export PYSPARK_DRIVER_PYTHON=$python
# The words of FLOE_SUBMIT are options of their own.
# shellcheck disable=SC2086
exec "$submit" --master "$master" ${FLOE_SUBMIT:-} "$program" "$@" --master "$master"
