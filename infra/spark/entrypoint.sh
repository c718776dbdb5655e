#!/bin/bash
# What a pod of Spark on Kubernetes runs: `executor` where Spark asks for one, anything else as a command of floe.
set -euo pipefail
[ "${1:-}" = executor ] || exec floe "$@"

# Hadoop asks the host for the name of the user, and OpenShift runs a pod as a number; Floe itself needs none.
if ! whoami >/dev/null 2>&1 && [ -w /etc/passwd ]; then
  echo "floe-executor:x:$(id -u):$(id -g)::/tmp:/usr/sbin/nologin" >>/etc/passwd
fi

options=()
for name in $(compgen -e | grep '^SPARK_JAVA_OPT_' | sort -t_ -k4 -n); do
  options+=("${!name}")
done
jars=$(python -c 'import importlib.util; print(importlib.util.find_spec("pyspark").submodule_search_locations[0])')/jars
exec "${JAVA_HOME:+$JAVA_HOME/bin/}java" "${options[@]}" "-Xms$SPARK_EXECUTOR_MEMORY" "-Xmx$SPARK_EXECUTOR_MEMORY" \
  -cp "${SPARK_CONF_DIR:+$SPARK_CONF_DIR:}$jars/*" org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend \
  --driver-url "$SPARK_DRIVER_URL" --executor-id "$SPARK_EXECUTOR_ID" --cores "$SPARK_EXECUTOR_CORES" \
  --app-id "$SPARK_APPLICATION_ID" --hostname "$SPARK_EXECUTOR_POD_IP" \
  --resourceProfileId "$SPARK_RESOURCE_PROFILE_ID" --podName "$SPARK_EXECUTOR_POD_NAME"
