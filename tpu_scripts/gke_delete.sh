#!/usr/bin/env bash
# Ends the workload, or with --cluster the cluster and all in it; the bucket stays. Asks, unless
# --yes.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
begin 'gke_delete.sh [--cluster] [--yes]' '--cluster --yes' "$@"
need PROJECT ZONE CLUSTER NAME

victim="the workload $NAME of $CLUSTER"
! given --cluster || victim="the cluster $CLUSTER with every workload in it"
if [[ $dry_run == no ]] && ! given --yes; then
  read -rp "Delete $victim in $ZONE of $PROJECT? Type yes: " answer || answer=''
  [[ $answer == yes ]] || die "nothing was deleted; --yes deletes without asking."
fi
if given --cluster; then
  run xpk cluster delete --cluster="$CLUSTER" --project="$PROJECT" --zone="$ZONE" --force
else
  run xpk workload delete --workload="$NAME" --cluster="$CLUSTER" --project="$PROJECT" \
    --zone="$ZONE" --force
fi
