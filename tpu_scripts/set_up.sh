#!/usr/bin/env bash
# Copies this tree to every worker, installs it there, and mounts the bucket.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
begin 'set_up.sh' '' "$@"
need PROJECT ZONE NAME BUCKET
check_env_file

pack
copy_to_workers "$packed" exgrpo_tree.tar.gz
# `free` fails if training is running, because the tree must not be replaced then.
on_workers all "if [ -e $remote ]; then bash $remote free; fi && \
rm -rf exgrpo/tree && mkdir -p exgrpo/tree && tar -xzf exgrpo_tree.tar.gz -C exgrpo/tree && \
bash $remote install && bash $remote mount $BUCKET"
# This must follow `install`, which creates the folder that only the worker's user can read.
[[ -z ${ENV_FILE:-} ]] || copy_to_workers "$ENV_FILE" exgrpo/private/env
