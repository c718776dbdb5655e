#!/bin/sh
# deb: remove or upgrade; rpm: 0 at the last removal, 1 at an upgrade.
set -e
if [ -d /run/systemd/system ] && { [ "$1" = remove ] || [ "$1" = 0 ]; }; then
  systemctl stop 'floe-*.timer' 'floe-*.service' || true
  systemctl disable floe-egress@.service floe-ingress.service floe-compact.timer floe-verify.timer floe-drill@.timer floe-compare@.timer floe-check@.timer || true
fi
