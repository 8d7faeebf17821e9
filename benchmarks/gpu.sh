#!/usr/bin/env bash
# The benchmarks that matter on a GPU, and a profile of one epoch, in less than 8 minutes.
#
#   benchmarks/gpu.sh [FOLDER]              write figures, plots and logs to FOLDER
#                                           (default: build/benchmarks-gpu)
#   REHEARSE=1 benchmarks/gpu.sh [FOLDER]   the same, tiny and on the CPU, as a test
#
# Uses $PYTHON, or else python. If a part fails or exceeds its time limit, the others still
# run, the summary reports it, and the exit code is 1.
set -euo pipefail
cd "$(dirname "$0")/.."
output=${1:-build/benchmarks-gpu}
mkdir -p "$output"
summary=() failed=0

# part NAME SECONDS SCRIPT OPTIONS...
part() {
    local name=$1 limit=$2 start=$SECONDS status=0
    shift 2
    echo "== $name (at most $limit s)"
    timeout --kill-after=5 "$limit" "${PYTHON:-python}" "$@" --output "$output" \
        2>&1 | tee "$output/$name.log" || status=$?
    case $status in
        0) summary+=("$(printf '%-14s %4d s  done' "$name" $((SECONDS - start)))") ;;
        124 | 137) summary+=("$(printf '%-14s %4d s  timed out' "$name" $((SECONDS - start)))") ;;
        *) summary+=("$(printf '%-14s %4d s  failed: %d' "$name" $((SECONDS - start)) "$status")") ;;
    esac
    ((status == 0)) || failed=1
}

if [[ -n ${REHEARSE:-} ]]; then
    export JAX_PLATFORMS=cpu
    part step_overhead 120 benchmarks/step_overhead.py --rounds 1 --depths 4 --seconds 0.01
    part data 300 benchmarks/data.py --rounds 1 --seconds 0.05 --mapped-gigabytes 0.05
    part profile 120 benchmarks/_profile_epoch.py --examples 960
    part epoch 300 benchmarks/epoch.py --rounds 1 --examples 960 --models lenet --devices 1
    part start 300 benchmarks/start.py --rounds 1
else
    # The most important first, in case time runs out. The limits add up to 475 s.
    part epoch 170 benchmarks/epoch.py --rounds 3
    part profile 35 benchmarks/_profile_epoch.py
    part step_overhead 45 benchmarks/step_overhead.py --rounds 5 --seconds 0.03
    part data 75 benchmarks/data.py --rounds 1 --seconds 0.1 --mapped-gigabytes 0.2
    part start 150 benchmarks/start.py --rounds 1
fi

echo "== summary (results are in $output)"
printf '%s\n' "${summary[@]}"
exit $failed
