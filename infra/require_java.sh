#!/usr/bin/env bash
# Stops at once, with the line that installs it, where Java 17 or 21 is missing. Spark 4 runs on no other.
set -u
java=java
[ -n "${JAVA_HOME:-}" ] && java="$JAVA_HOME/bin/java"
version=$("$java" -version 2>&1 | sed -n 's/.*version "\([0-9]*\).*/\1/p' | head -n 1)
case "$version" in
  17 | 21) exit 0 ;;
esac
case "$(uname -s)" in
  Darwin) line="brew install openjdk@21 && export JAVA_HOME=\$(brew --prefix openjdk@21)" ;;
  *)
    if command -v apt-get >/dev/null 2>&1; then line="sudo apt-get install -y openjdk-17-jre-headless"
    elif command -v dnf >/dev/null 2>&1; then line="sudo dnf install -y java-21-openjdk-headless"
    else line="install OpenJDK 17 or 21 and set JAVA_HOME"; fi ;;
esac
echo "Floe's compaction needs Java 17 or 21; found: ${version:-none}. Install it, then run make again:" >&2
echo "  $line" >&2
exit 1
