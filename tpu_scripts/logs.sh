#!/usr/bin/env bash
# Follows the output of training on worker 0, on another worker (--worker=3), or on all workers.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
begin 'logs.sh [--worker=N|all]' '--worker=*' "$@"
need PROJECT ZONE NAME

worker=0
for option in ${options[@]+"${options[@]}"}; do
  [[ $option != --worker=* ]] || worker=${option#*=}
done
[[ $worker =~ ^([0-9]+|all)$ ]] ||
  die "--worker=$worker: the value must be all, or the zero-based index of a worker."
on_workers "$worker" 'tail -n 100 -F exgrpo/log'
