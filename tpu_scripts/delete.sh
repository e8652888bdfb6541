#!/usr/bin/env bash
# Deletes the slice with everything on its VMs. Keeps the bucket. Asks first unless --yes is given.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
source "$here/node.sh"
begin 'delete.sh [--yes]' '--yes' "$@"
need PROJECT ZONE NAME

if [[ $dry_run == no ]] && ! has_option --yes; then
  read -rp "Delete $NAME in $ZONE of $PROJECT? Type yes: " answer || answer=''
  [[ $answer == yes ]] || die "nothing was deleted. To delete without being asked, add --yes."
fi
delete_node
