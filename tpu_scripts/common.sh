# shellcheck shell=bash
# Code that all scripts share: arguments, variables, and commands, which --dry_run only prints.

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
tree=$(dirname "$here")
dry_run=no
options=()  # the arguments as given, to be passed on to other scripts
# shellcheck disable=SC2034
remote='exgrpo/tree/tpu_scripts/worker.sh'  # relative to the home folder on a worker

say() { printf '%s\n' "$*" >&2; }

die() {
  say "error: $*"
  exit 2
}

# begin USAGE FLAGS ARGUMENT...: parses the arguments, then sources the variables file.
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
      *) matches_any "$argument" "$flags" ||
           die "unknown argument '$argument'; usage: $usage [--variables=FILE] [--dry_run]" ;;
    esac
    options+=("$argument")
  done
  [[ -f $file ]] || die "there is no variables file '$file'. Name one with --variables=FILE."
  variables=$file
  # shellcheck source=variables.sh
  source "$file"
}

# matches_any ARGUMENT PATTERNS: succeeds if the argument matches one of the patterns.
matches_any() {
  local pattern
  set -f  # do not expand the patterns to file names
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

# has_option OPTION: succeeds if the user gave the option.
has_option() {
  local option
  for option in ${options[@]+"${options[@]}"}; do
    [[ $option == "$1" ]] && return 0
  done
  return 1
}

# need NAME...: exits with an error if any of these variables is empty or malformed.
need() {
  local name
  for name in "$@"; do
    [[ -n ${!name:-} ]] || die "$name is not set in $variables: $(meaning "$name")"
  done
  for name in "$@"; do
    case $name in
      SPOT) check_format SPOT '^(yes|no)$' ;;
      NAME) check_format NAME '^[a-z]([-a-z0-9]*[a-z0-9])?$' ;;
      BUCKET) check_format BUCKET '^[a-z0-9][-_.a-z0-9]*$' ;;
      RUN) check_format RUN '^[^/]+(/[^/]+)*$' ;;
      POLL_SECONDS | MAX_FAILURES | MAX_RESTARTS) check_format "$name" '^[0-9]+$' ;;
    esac
  done
}

# check_format NAME REGEX
check_format() {
  [[ ${!1} =~ $2 ]] || die "$1='${!1}' in $variables is malformed: $(meaning "$1")"
}

# meaning NAME: prints the comment above this variable in the repository's variables.sh.
meaning() {
  awk -v name="$1" '
    /^# / { text = text (text == "" ? "" : " ") substr($0, 3); next }
    index($0, name "=") == 1 { print text; exit }
    { text = "" }' "$here/variables.sh"
}

# show COMMAND...: prints the command as one shell-quoted line.
show() {
  local word line='' escaped="'\\''"
  for word in "$@"; do
    [[ $word =~ ^[A-Za-z0-9_@%+=:,./-]+$ ]] || word="'${word//\'/$escaped}'"
    line+="${line:+ }$word"
  done
  printf '%s\n' "$line"
}

# run COMMAND...: runs the command, or prints it if --dry_run is given.
run() {
  if [[ $dry_run == yes ]]; then
    show "$@"
  else
    "$@"
  fi
}

# on_workers all|NUMBER COMMAND: runs a shell command on all workers of the slice, or on one. Without
# these ssh options, ssh would wait for hours if a worker disappears while it is connected.
on_workers() {
  run gcloud compute tpus tpu-vm ssh "$NAME" --project="$PROJECT" --zone="$ZONE" \
    --worker="$1" --command="$2" --quiet \
    --ssh-flag='-oConnectTimeout=30 -oServerAliveInterval=30'
}

# copy_to_workers FILE TARGET: copies a file to all workers. TARGET is relative to the home folder.
copy_to_workers() {
  run gcloud compute tpus tpu-vm scp "$1" "$NAME:$2" --project="$PROJECT" --zone="$ZONE" \
    --worker=all --quiet --scp-flag=-oServerAliveInterval=30
}

workdir() { printf '/mnt/%s/%s' "$BUCKET" "$RUN"; }

# python_command PYTHON COMMAND: prints a command with the training flags as one shell-quoted line.
# Compiled programs are kept in the bucket for the next slice and for other runs.
python_command() {
  show "$1" -m exgrpo_jax "$2" --config="$CONFIG" --workdir="$(workdir)" \
    --config.compilation_cache="/mnt/$BUCKET/compiled" \
    ${TRAIN_FLAGS[@]+"${TRAIN_FLAGS[@]}"}
}

# Prints the training command. worker.sh puts the right python on the PATH.
train_command() { python_command python train; }

# check_config: exits with an error if training would reject its flags or its config. The check
# runs on this machine in seconds, and needs neither the data nor the weights.
check_config() {
  local status=0 command
  command="cd $(show "$tree") && $(python_command "$PYTHON" check)"
  if [[ $dry_run == yes ]]; then
    printf '%s\n' "$command"
    return
  fi
  (eval "$command") >&2 || status=$?
  case $status in
    0) ;;
    2) die "training would reject its settings, so nothing was done. Fix CONFIG or TRAIN_FLAGS" \
           "in $variables." ;;
    1) die "the config could not be checked, so nothing was done. If neither the network nor the" \
           "storage failed, PYTHON='$PYTHON' in $variables is wrong: $(meaning PYTHON)" ;;
    *) die "PYTHON='$PYTHON' in $variables cannot check the config: $(meaning PYTHON)" ;;
  esac
}

# check_env_file: exits with an error if the file in ENV_FILE does not exist.
check_env_file() {
  [[ -z ${ENV_FILE:-} || -f $ENV_FILE ]] ||
    die "ENV_FILE='$ENV_FILE' in $variables is not a file: $(meaning ENV_FILE)"
}

# Packs the files that training needs into the archive $packed.
pack() {
  local folder=${TMPDIR:-/tmp}/exgrpo_jax_$NAME
  packed=$folder/tree.tar.gz
  run mkdir -p "$folder"
  run tar -czf "$packed" --exclude=__pycache__ -C "$tree" \
    exgrpo_jax configs tpu_scripts setup.cfg pyproject.toml README.md LICENSE
}
