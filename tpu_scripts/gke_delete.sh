#!/usr/bin/env bash
# Deletes the workload, or with --cluster the cluster and everything in it. Keeps the bucket. Asks
# first unless --yes is given.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
begin 'gke_delete.sh [--cluster] [--yes]' '--cluster --yes' "$@"
need PROJECT ZONE CLUSTER NAME

victim="workload $NAME of cluster $CLUSTER"
! has_option --cluster || victim="cluster $CLUSTER with all of its workloads"
if [[ $dry_run == no ]] && ! has_option --yes; then
  read -rp "Delete $victim in $ZONE of $PROJECT? Type yes: " answer || answer=''
  [[ $answer == yes ]] || die "nothing was deleted. To delete without being asked, add --yes."
fi
if has_option --cluster; then
  run xpk cluster delete --cluster="$CLUSTER" --project="$PROJECT" --zone="$ZONE" --force
else
  run xpk workload delete --workload="$NAME" --cluster="$CLUSTER" --project="$PROJECT" \
    --zone="$ZONE" --force
fi
