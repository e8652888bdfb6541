#!/usr/bin/env bash
# Copies the run's folder from the bucket to results/, without checkpoints unless --all is given.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
begin 'fetch.sh [--all]' '--all' "$@"
need PROJECT BUCKET RUN

exclude=('--exclude=^(checkpoints|warm_start)/.*')
! has_option --all || exclude=()
run mkdir -p "$tree/results/$RUN"
run gcloud storage rsync "gs://$BUCKET/$RUN" "$tree/results/$RUN" --project="$PROJECT" --recursive \
  ${exclude[@]+"${exclude[@]}"}
