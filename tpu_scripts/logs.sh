#!/usr/bin/env bash
# Follows what training prints on worker 0, or on the worker given (--worker=3, --worker=all).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
begin 'logs.sh [--worker=N|all]' '--worker=*' "$@"
need PROJECT ZONE NAME

worker=0
for option in ${options[@]+"${options[@]}"}; do
  [[ $option != --worker=* ]] || worker=${option#*=}
done
[[ $worker =~ ^([0-9]+|all)$ ]] || die "--worker=$worker must be a worker's number from 0, or all."
on_workers "$worker" 'tail -n 100 -F exgrpo/log'
