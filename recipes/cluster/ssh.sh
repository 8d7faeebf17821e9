#!/bin/bash
# Train on several hosts that ssh can log into without a password:
#
#     recipes/cluster/ssh.sh [options] HOSTS COMMAND...
#     recipes/cluster/ssh.sh hosts.txt python recipes/fashion_mnist.py --resume auto
#
# HOSTS is a file with one host per line. All hosts must have the checkout, and the folder
# of the run, at the same path. The first host listens for the others, which must be able to
# reach it by its name in the file; and each host's own name must resolve to an address that
# the others can reach.
#
# Options:
#     --per-host N     processes on each host, each with one GPU (default: one, with all)
#     --port PORT      where the first process listens (29400)
#     --directory DIR  where to run (this directory)
#     --dry-run        print the commands and do nothing
#
# When a process fails, or this script is stopped, the others get SIGTERM, so that they can
# save, and are killed after a minute.
set -u

usage() {
    echo "error: $1; see the comment at the top of $0." >&2
    exit 2
}

per_host= port=29400 directory=$PWD dry_run=
while [[ ${1-} == -* ]]; do
    case $1 in
        --dry-run) dry_run=yes; shift ;;
        --per-host | --port | --directory)
            [[ $# -ge 2 ]] || usage "$1 has no value"
            case $1 in
                --per-host) per_host=$2 ;;
                --port) port=$2 ;;
                --directory) directory=$2 ;;
            esac
            shift 2
            ;;
        *) usage "unknown option $1" ;;
    esac
done
[[ -z $per_host || $per_host =~ ^[1-9][0-9]*$ ]] || usage "--per-host $per_host is not a positive number"
[[ $port =~ ^[1-9][0-9]*$ ]] || usage "--port $port is not a positive number"
[[ $# -ge 2 ]] || usage "give a file of hosts and a command"
[[ -r $1 ]] || usage "there is no file $1"

hosts=()
while read -r host _ || [[ -n $host ]]; do
    [[ -z $host || $host == \#* ]] || hosts+=("$host")
done < "$1"
shift
[[ ${#hosts[@]} -gt 0 ]] || usage "there are no hosts in the file"
count=$((${#hosts[@]} * ${per_host:-1}))

# Quote words for any shell.
quoted() { # WORD...
    local word quote="'\\''"
    for word; do
        if [[ $word =~ ^[A-Za-z0-9_./=:,@%+-]+$ ]]; then
            printf '%s ' "$word"
        else
            printf "'%s' " "${word//\'/$quote}"
        fi
    done
}

# The command for the shell of a host. It runs until the command ends, or until its standard
# input ends. That happens when this script ends for any reason: ssh passes on no signals.
remote() { # NUMBER LOCAL_NUMBER COMMAND...
    local settings number=$1 gpu=$2
    shift 2
    settings="EQXSHARD_ADDRESS=${hosts[0]#*@}:$port EQXSHARD_PROCESSES=$count"
    settings+=" EQXSHARD_PROCESS=$number"
    [[ -z $per_host ]] || settings+=" CUDA_VISIBLE_DEVICES=$gpu"
    printf 'cd %s&& exec 3<&0 || exit; ' "$(quoted "$directory")"
    printf 'env %s %s</dev/null 3<&- & run=$!; ' "$settings" "$(quoted "$@")"
    printf '%s' '(cat <&3; kill $run; sleep 60; kill -9 $run) >/dev/null 2>&1 & ends=$!; '
    printf '%s' 'wait $run; code=$?; kill $ends; exit $code'
}

connect=(ssh -o BatchMode=yes -o ConnectTimeout=20 -o ServerAliveInterval=15)
if [[ -n $dry_run ]]; then
    for ((n = 0; n < count; n++)); do
        host=${hosts[n / ${per_host:-1}]} text=$(remote "$n" $((n % ${per_host:-1})) "$@")
        echo "${connect[*]} $host ${text@Q}"
    done
    exit
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# File 8 is the standard input of all processes; closing 9 ends it.
mkfifo "$work/input"
exec 9<> "$work/input" 8< "$work/input"
stop() { exec 9>&-; }
stopped=
trap 'stopped=143; stop' INT TERM HUP

start() { # NUMBER HOST TEXT
    "${connect[@]}" "$2" "$3" <&8 2>&1 | while IFS= read -r line; do
        printf '[%s] %s\n' "$1" "$line"
    done
    echo "${PIPESTATUS[0]}" > "$work/$1.part"
    mv "$work/$1.part" "$work/$1.status"
}

for ((n = 0; n < count; n++)); do
    host=${hosts[n / ${per_host:-1}]}
    start "$n" "$host" "$(remote "$n" $((n % ${per_host:-1})) "$@")" 9>&- &
done

status=0
while true; do
    left=0
    for ((n = 0; n < count; n++)); do
        if [[ ! -e $work/$n.status ]]; then
            left=$((left + 1))
        elif [[ $status == 0 && -z $stopped && $(< "$work/$n.status") != 0 ]]; then
            status=$(< "$work/$n.status")
            echo "process $n on ${hosts[n / ${per_host:-1}]} ended with status $status;" \
                "the others will stop." >&2
            stop
        fi
    done
    [[ $left -gt 0 ]] || break
    sleep 0.2
done
exit "${stopped:-$status}"
