#!/usr/bin/env bash
# The benchmarks that matter on a GPU. Those of the language model take most of the time;
# the others less than 8 minutes.
#
#   benchmarks/gpu.sh [FOLDER]              write figures, plots and logs to FOLDER
#                                           (default: build/benchmarks-gpu)
#   ONLY="gpt_124m epoch" benchmarks/gpu.sh [FOLDER]
#                                           only these parts
#   REHEARSE=1 benchmarks/gpu.sh [FOLDER]   the same, tiny and on the CPU, as a test
#
# Uses $PYTHON, or else python. If a part fails or exceeds its time limit, the others still
# run, the summary reports it, and the exit code is 1. Text of Shakespeare comes from
# $EQXSHARD_DATA_DIR, or is downloaded.
set -euo pipefail
cd "$(dirname "$0")/.."
output=${1:-build/benchmarks-gpu}
mkdir -p "$output"
summary=() failed=0

# part NAME SECONDS SCRIPT OPTIONS...
part() {
    local name=$1 limit=$2 start=$SECONDS status=0
    shift 2
    [[ -z ${ONLY:-} || " $ONLY " == *" $name "* ]] || return 0
    echo "== $name (at most $limit s)"
    timeout --kill-after=5 "$limit" "${PYTHON:-python}" "$@" 2>&1 |
        tee "$output/$name.log" || status=$?
    case $status in
        0) summary+=("$(printf '%-15s %4d s  done' "$name" $((SECONDS - start)))") ;;
        124 | 137) summary+=("$(printf '%-15s %4d s  timed out' "$name" $((SECONDS - start)))") ;;
        *) summary+=("$(printf '%-15s %4d s  failed: %d' "$name" $((SECONDS - start)) "$status")") ;;
    esac
    ((status == 0)) || failed=1
}

to=(--output "$output")
half=(--precision bfloat16)
if [[ -n ${REHEARSE:-} ]]; then
    export JAX_PLATFORMS=cpu
    text=$(mktemp --suffix .txt)
    trap 'rm "$text"' EXIT
    printf 'To be, or not to be, that is the question.\n%.0s' {1..400} >"$text"
    tiny=(--layers 1 --embed 16 --mlp 32 --heads 2 --seq-len 16 --batch-size 8 --devices 1)
    part step_overhead 120 benchmarks/step_overhead.py --rounds 1 --depths 4 --seconds 0.01 "${to[@]}"
    part data 300 benchmarks/data.py --rounds 1 --seconds 0.05 --mapped-gigabytes 0.05 "${to[@]}"
    part profile 120 benchmarks/_profile_epoch.py --examples 960 "${to[@]}"
    part epoch 300 benchmarks/epoch.py --rounds 1 --examples 960 --models lenet --devices 1 "${to[@]}"
    part start 300 benchmarks/start.py --rounds 1 "${to[@]}"
    part gpt_124m 300 benchmarks/gpt.py --size small --rounds 1 --steps 2 --devices 1 "${half[@]}" "${to[@]}"
    part profile_gpt 300 benchmarks/_profile_gpt.py --output "$output/profile_gpt" --steps 2:3 -- \
        "${tiny[@]}" "${half[@]}"
    part gpt_1b 300 benchmarks/gpt.py --size tiny --rounds 1 --steps 2 --devices 1 "${half[@]}" "${to[@]}"
    part shakespeare_gpu 300 benchmarks/_shakespeare.py --config gpu --seeds 1 2 --output "$output/shakespeare" -- \
        --data "$text" "${tiny[@]}" --steps 4 --evaluate-every 2
else
    # The most important first, in case time runs out.
    part gpt_124m 400 benchmarks/gpt.py --size 124m --seq-len 1024 --batch-size 16 --remat none "${half[@]}" "${to[@]}"
    part profile_gpt 200 benchmarks/_profile_gpt.py --output "$output/profile_gpt" -- \
        --size 124m --seq-len 1024 --batch-size 16 "${half[@]}"
    part gpt_1b 300 benchmarks/gpt.py --size 1b --seq-len 2048 --batch-size 8 --remat dots "${half[@]}" "${to[@]}"
    part epoch 170 benchmarks/epoch.py --rounds 3 "${to[@]}"
    part profile 35 benchmarks/_profile_epoch.py "${to[@]}"
    part step_overhead 45 benchmarks/step_overhead.py --rounds 5 --seconds 0.03 "${to[@]}"
    part data 75 benchmarks/data.py --rounds 1 --seconds 0.1 --mapped-gigabytes 0.2 "${to[@]}"
    part start 150 benchmarks/start.py --rounds 1 "${to[@]}"
    part shakespeare_gpu 1800 benchmarks/_shakespeare.py --config gpu --output "$output/shakespeare"
fi

if ((${#summary[@]} == 0)); then
    echo "ONLY=\"$ONLY\" names no part." >&2
    exit 2
fi
echo "== summary (results are in $output)"
printf '%s\n' "${summary[@]}"
exit $failed
