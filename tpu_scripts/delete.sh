#!/usr/bin/env bash
# Gives the slice back, with all that is on its VMs; the bucket stays. Asks, unless --yes.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
source "$here/node.sh"
begin 'delete.sh [--yes]' '--yes' "$@"
need PROJECT ZONE NAME

if [[ $dry_run == no ]] && ! given --yes; then
  read -rp "Delete $NAME in $ZONE of $PROJECT? Type yes: " answer || answer=''
  [[ $answer == yes ]] || die "nothing was deleted; --yes deletes without asking."
fi
delete_node
