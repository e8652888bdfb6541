# shellcheck shell=bash
# What all scripts share: arguments, variables, and commands that --dry_run prints.

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
tree=$(dirname "$here")
dry_run=no
options=()  # as given, for the scripts that a script calls
# shellcheck disable=SC2034
remote='exgrpo/tree/tpu_scripts/worker.sh'  # from a worker's home folder

say() { printf '%s\n' "$*" >&2; }

die() {
  say "error: $*"
  exit 2
}

# begin USAGE FLAGS ARGUMENT...: reads the arguments, then the file of variables.
#
# FLAGS are the script's own flags, separated by spaces, as patterns such as --worker=*.
begin() {
  local usage=$1 flags=$2 argument file=$here/variables.sh
  shift 2
  for argument in "$@"; do
    case $argument in
      --dry_run) dry_run=yes ;;
      --variables=*) file=${argument#*=} ;;
      --help)
        say "usage: $usage [--variables=FILE] [--dry_run]"
        exit 0 ;;
      *) matches "$argument" "$flags" ||
           die "'$argument' is no argument of this script; usage: $usage" \
               "[--variables=FILE] [--dry_run]" ;;
    esac
    options+=("$argument")
  done
  [[ -f $file ]] || die "there is no file '$file' of variables; --variables=FILE names one."
  variables=$file
  # shellcheck source=variables.sh
  source "$file"
}

matches() {
  local pattern
  set -f  # patterns are for the argument, not for files
  for pattern in $2; do
    # shellcheck disable=SC2053
    if [[ $1 == $pattern ]]; then
      set +f
      return 0
    fi
  done
  set +f
  return 1
}

# given FLAG: whether the user gave it.
given() {
  local option
  for option in ${options[@]+"${options[@]}"}; do
    [[ $option == "$1" ]] && return 0
  done
  return 1
}

# need NAME...: refuses variables that are empty or cannot be.
need() {
  local name
  for name in "$@"; do
    [[ -n ${!name:-} ]] || die "$name is not set in $variables: $(meaning "$name")"
  done
  for name in "$@"; do
    case $name in
      SPOT) accept SPOT '^(yes|no)$' ;;
      NAME) accept NAME '^[a-z]([-a-z0-9]*[a-z0-9])?$' ;;
      BUCKET) accept BUCKET '^[a-z0-9][-_.a-z0-9]*$' ;;
      RUN) accept RUN '^[^/]+(/[^/]+)*$' ;;
      POLL_SECONDS | MAX_FAILURES | MAX_RESTARTS) accept "$name" '^[0-9]+$' ;;
    esac
  done
}

accept() {
  [[ ${!1} =~ $2 ]] || die "$1='${!1}' in $variables cannot be: $(meaning "$1")"
}

# The comment above a variable in the variables.sh of the repository.
meaning() {
  awk -v name="$1" '
    /^# / { text = text (text == "" ? "" : " ") substr($0, 3); next }
    index($0, name "=") == 1 { print text; exit }
    { text = "" }' "$here/variables.sh"
}

# show COMMAND...: one line that a shell reads as that command.
show() {
  local word line='' escaped="'\\''"
  for word in "$@"; do
    [[ $word =~ ^[A-Za-z0-9_@%+=:,./-]+$ ]] || word="'${word//\'/$escaped}'"
    line+="${line:+ }$word"
  done
  printf '%s\n' "$line"
}

# run COMMAND...: runs it, or with --dry_run only prints it.
run() {
  if [[ $dry_run == yes ]]; then
    show "$@"
  else
    "$@"
  fi
}

# on_workers WORKERS COMMAND: a shell command on workers of the slice: all, or one's number.
on_workers() {
  run gcloud compute tpus tpu-vm ssh "$NAME" --project="$PROJECT" --zone="$ZONE" \
    --worker="$1" --command="$2" --quiet
}

workdir() { printf '/mnt/%s/%s' "$BUCKET" "$RUN"; }

# The training command as one shell-quoted line; worker.sh finds the right python.
train_command() {
  show python -m exgrpo_jax.train --config="$CONFIG" --workdir="$(workdir)" \
    ${TRAIN_FLAGS[@]+"${TRAIN_FLAGS[@]}"}
}

# Packs what training needs of this tree, and nothing else that lies in it, into $packed.
pack() {
  local folder=${TMPDIR:-/tmp}/exgrpo_jax_$NAME
  packed=$folder/tree.tar.gz
  run mkdir -p "$folder"
  run tar -czf "$packed" --exclude=__pycache__ -C "$tree" \
    exgrpo_jax configs tpu_scripts setup.cfg pyproject.toml README.md LICENSE
}
