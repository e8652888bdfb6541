#!/usr/bin/env bash
# Starts training on all workers as a detached process. Training resumes from the newest checkpoint.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
begin 'launch.sh' '' "$@"
need PROJECT ZONE NAME BUCKET RUN CONFIG

on_workers all "bash $remote start $(show "$(workdir)") $(train_command)"
