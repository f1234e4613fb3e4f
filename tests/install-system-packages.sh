#!/bin/sh
# Debian packages that the tests use beside Python's: the real Prometheus and Alertmanager, and a C compiler.
set -eu
missing=""
command -v promtool >/dev/null 2>&1 || missing="$missing prometheus"
command -v amtool >/dev/null 2>&1 || missing="$missing prometheus-alertmanager"
command -v gcc >/dev/null 2>&1 || missing="$missing gcc libc6-dev"  # builds a fake GPU driver
[ -n "$missing" ] || exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then
    echo "missing:$missing (install them to run the tests against the real servers; those tests are skipped now)"
    exit 0
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
# shellcheck disable=SC2086 - a list of words on purpose
apt-get install -y -qq --no-install-recommends $missing >/dev/null
