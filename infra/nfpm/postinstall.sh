#!/bin/sh
# deb: configure [former version]; rpm: 1 at the first installation, 2 at an upgrade.
set -e
if command -v systemd-sysusers >/dev/null 2>&1; then
  systemd-sysusers /usr/lib/sysusers.d/floe.conf
elif ! getent passwd floe >/dev/null; then
  useradd --system --user-group --no-create-home --home-dir /var/lib/floe --shell /usr/sbin/nologin floe
fi
# Operators in the group `floe`, and cron lines of that user, read the credentials too.
chgrp floe /etc/floe/credentials && chmod 0750 /etc/floe/credentials
if [ -d /run/systemd/system ]; then
  systemctl daemon-reload
  if [ "$1" = 2 ] || [ -n "$2" ]; then
    # What runs drains and goes on with the new version.
    systemctl try-restart 'floe-egress@*.service' floe-ingress.service || true
  fi
fi
