#!/usr/bin/env bash
# Ends training on all workers by SIGTERM, and what has not ended after five minutes by SIGKILL.
# The slice stays.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
begin 'stop.sh' '' "$@"
need PROJECT ZONE NAME

on_workers all "if [ -e $remote ]; then bash $remote stop; fi"
