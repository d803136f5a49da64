#!/usr/bin/env bash
# Ten minutes on a GPU that nothing has run on yet: two stages of five, and two more for those who have longer.
#
#     benchmarks/first_contact.sh 1|2|3|4
#
#   1  does it run: hardware and versions; every kernel's check; the GPU tests of casts and products
#   2  is it fast: casts, GEMMs, a linear layer, a transformer layer and a training step, beside bf16-mixed
#   3  more tests: experts, blocks, graphs, threads; a compiled layer
#   4  small sizes, memory checks, profiles
#
# What is worth most comes first. A stage can be run again, also on another machine: it needs nothing of the others.
#
# Every step has a time limit, and the next step runs even if one fails or hangs. Results are written as they come, to
# three files: stageN.log, all output; stageN-summary.tsv, a line for each step; stageN.jsonl, the rows of benchmarks.
#
# Environment, with defaults: OUT, the folder of these files (./first_contact). CUBINS, a folder that `doctor --compile`
# filled elsewhere (build/cubins): copied into the cache, where only this user may write. Git ignores it, so a copy of
# the checkout on another machine has it only if it is named along with the tracked files. PYTHON (python, or python3
# where there is no python). LIMIT_SCALE, a factor for the steps' time limits (1).
set -u
umask 022
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
stage=${1:-}
case $stage in [1-4]) ;; *) echo "usage: $0 1|2|3|4" >&2; exit 64 ;; esac
python=${PYTHON:-$(command -v python >/dev/null && echo python || echo python3)}
cubins=${CUBINS:-$root/build/cubins}
mkdir -p "${OUT:=first_contact}"
out=$(cd "$OUT" && pwd)
log=$out/stage$stage.log summary=$out/stage$stage-summary.tsv rows=$out/stage$stage.jsonl
cd "$root" || exit
cache=${LIGHTNING_FP8_CACHE_DIR:-$root/build/cache}
export LIGHTNING_FP8_CACHE_DIR=$cache PYTHONUNBUFFERED=1 PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
# bytes that a log is truncated to, so that it stays easy to copy
most=12000000
failed=0
private=$(mktemp -d) pipe=$private/output

calculated() { awk "BEGIN { print $1 }"; }

# ended_within SECONDS PROCESS: the status of the process; 0, that of the clock, if it has not ended
ended_within() {
    local clock status
    sleep "$1" >/dev/null 2>&1 &
    clock=$!
    wait -n "$2" "$clock"
    status=$?
    kill "$clock" 2>/dev/null
    return "$status"
}

# step NAME SECONDS COMMAND...
step() {
    local name=$1 seconds=$2 began=$EPOCHREALTIME limit grace process teller status
    shift 2
    limit=$(calculated "$seconds * ${LIMIT_SCALE:-1}") grace=$(calculated "5 * ${LIMIT_SCALE:-1}")
    printf '\n=== %s, at most %s s: %s\n' "$name" "$limit" "${*@Q}" | tee -a "$log"
    rm -f "$pipe" && mkfifo "$pipe"
    tee -a "$log" <"$pipe" &
    teller=$!
    timeout -k "$grace" "$limit" "$@" </dev/null >"$pipe" 2>&1 &
    process=$!
    # a process may be stuck in the driver, where no signal ends it
    ended_within "$(calculated "$limit + $grace + 5")" "$process"
    status=$?
    kill -0 "$process" 2>/dev/null && status=stuck
    # processes that a step leaves behind may hold its output open
    ended_within 2 "$teller"
    kill "$teller" 2>/dev/null
    case $status in 0) ;; 124 | 137) status="$status (time limit)" ;; esac
    [[ $status == 0 ]] || failed=1
    printf '%s\t%s\t%s\t%s\t%s\n' "$name" "$status" \
        "$(awk "BEGIN { printf \"%.1f\", $EPOCHREALTIME - $began }")" "$limit" "${*@Q}" | tee -a "$summary"
    [[ $(stat -c %s "$log") -le $most ]] || truncate -s "$most" "$log"
}

# each test is named before it runs; one that hangs prints where, and ends its own step only
pytest=("$python" -m pytest -v -m cuda --tb=short -p no:cacheprovider -o addopts=--strict-markers)

# tests NAME SECONDS EXPRESSION FILE
tests() {
    step "$1" "$2" "${pytest[@]}" -o faulthandler_timeout=40 -o faulthandler_exit_on_timeout=true "$4" -k "$3"
}

check_memory() {
    # with each tensor in an allocation of its own: next to a tensor in torch's cache is memory that may be accessed
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 step "$1" "$2" compute-sanitizer --tool memcheck --error-exitcode 1 "${pytest[@]}" "$4" -k "$3"
}

bench() {
    local name=$1 seconds=$2
    shift 2
    step "$name" "$seconds" "$python" -m benchmarks --rounds 10 --out "$rows" "$@"
}

# profile NAME SECONDS KERNEL SKIPPED ARGUMENT...: the kernel's launches of a case, after as many as its check has
# on a machine where it has not passed before. The clocks are left as other steps are timed at.
profile() {
    local name=$1 seconds=$2 kernel=$3 skipped=$4
    shift 4
    step "$name" "$seconds" ncu --set full --clock-control none --kill yes -k "regex:$kernel" -s "$skipped" -c 1 \
        "$python" -m benchmarks --rounds 1 "$@"
}

mkdir -p "$cache" && chmod -R go-w "$cache"
[[ ! -d $cubins ]] || cp -u "$cubins"/* "$cache"
commit=${COMMIT:-$(git describe --always --dirty --exclude='*' 2>/dev/null || echo unknown)}
printf '# stage %s, commit %s, %s\n' "$stage" "$commit" "$(date -u +%FT%TZ)" | tee -a "$log" >>"$summary"
printf 'step\tstatus\tseconds\tlimit\tcommand\n' >>"$summary"
step machine 10 nvidia-smi
case $stage in
    1)
        # the first to read torch's libraries from the disk
        step doctor 100 "$python" -m lightning_fp8 doctor
        tests "casts" 70 "bit_pattern or ragged or weights_and_scales" tests/ops/test_cuda.py
        tests "products" 110 "not block and not group" tests/ops/test_cuda_gemm.py
        ;;
    2)
        bench "dgrad 8192x4096x16384" 40 --suite gemm --case "dgrad 8192x4096x16384"
        bench "wgrad 16384x4096x8192" 40 --suite gemm --case "wgrad 16384x4096x8192"
        bench "casts, 8192 tokens" 45 --suite cast --case "8192x8192 bf16->e4m3 cast_transpose"
        bench "linear" 45 --suite linear --case "linear, 8192 tokens, 4096 -> 16384"
        bench "layer, eager" 60 --suite layer --case eager
        bench "GPT, a training step" 70 --suite train --case "124M, 1 x 16 x 1024 tokens, eager"
        ;;
    3)
        tests "graphs, threads, no waiting" 75 "not (check or theirs or bit_pattern or ragged or reduced_overhead)" tests/ops/test_cuda.py
        tests "experts and blocks" 90 "block or group" tests/ops/test_cuda_gemm.py
        bench "in blocks 8192x4096" 50 --suite blocks --case 8192x4096
        bench "fprop 8192x16384x4096" 45 --suite gemm --case "fprop 8192x16384x4096"
        bench "linear-GELU-linear" 60 --suite linear --case "linear-GELU-linear"
        bench "layer, compiled" 190 --suite layer --case compiled
        ;;
    4)
        bench "small GEMMs" 30 --suite gemm --case "2048x1024x1024"
        bench "update of scales" 30 --suite cast --case update_scales
        check_memory "memory check of ragged casts" 40 "ragged and 63" tests/ops/test_cuda.py
        check_memory "memory check of ragged products" 50 "ragged" tests/ops/test_cuda_gemm.py
        profile "profile of a GEMM" 35 gemm_sm 2 --suite gemm --case "dgrad 8192x4096x16384"
        profile "profile of a cast" 35 cast_transpose 12 --suite cast --case "8192x8192 bf16->e4m3 cast_transpose"
        ;;
esac
rm -rf "$private"
exit "$failed"
