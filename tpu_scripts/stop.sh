#!/usr/bin/env bash
# Stops training on all workers with SIGTERM, and after five minutes with SIGKILL. Keeps the slice.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
begin 'stop.sh' '' "$@"
need PROJECT ZONE NAME

on_workers all "if [ -e $remote ]; then bash $remote stop; fi"
