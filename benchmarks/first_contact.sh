#!/usr/bin/env bash
# Half an hour on a GPU that nothing has run on yet: four stages, each less than ten minutes even if steps hang.
#
#     benchmarks/first_contact.sh 1|2|3|4
#
#   1  hardware and versions; every kernel's self-test; the first GEMM and the first cast, timed
#   2  the GPU tests of GEMMs, CUDA graphs and threads, and that the host does not wait
#   3  GEMMs, layers and launches compared with their baselines
#   4  tuning of more layers; profiles; a memory check
#
# Every step has a time limit, and the next step runs even if one fails or hangs. Results are written as they come, to
# four files: stageN.log, all output; stageN-summary.tsv, a line for each step; stageN.jsonl, the rows of benchmarks;
# gemm-GPU.json, the measured table as of the last step.
#
# Environment, with defaults: OUT, the folder of these files (./first_contact). CUBINS, a folder that `doctor --compile`
# filled elsewhere (build/cubins): copied into the cache, where only this user may write. PYTHON (python).
# LIMIT_SCALE, a factor for the steps' time limits (1).
set -u
umask 022
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
stage=${1:-}
case $stage in [1-4]) ;; *) echo "usage: $0 1|2|3|4" >&2; exit 64 ;; esac
python=${PYTHON:-python}
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
    local name=$1 seconds=$2 began=$EPOCHREALTIME limit process teller status
    shift 2
    limit=$(calculated "$seconds * ${LIMIT_SCALE:-1}")
    printf '\n=== %s, at most %s s: %s\n' "$name" "$limit" "${*@Q}" | tee -a "$log"
    rm -f "$pipe" && mkfifo "$pipe"
    tee -a "$log" <"$pipe" &
    teller=$!
    timeout -k 5 "$limit" "$@" </dev/null >"$pipe" 2>&1 &
    process=$!
    # a process may be stuck in the driver, where no signal ends it
    ended_within "$(calculated "$limit + 10")" "$process"
    status=$?
    kill -0 "$process" 2>/dev/null && status=stuck
    # processes that a step leaves behind may hold its output open
    ended_within 2 "$teller"
    kill "$teller" 2>/dev/null
    case $status in 0) ;; 124 | 137) status="$status (time limit)" ;; esac
    [[ $status == 0 ]] || failed=1
    printf '%s\t%s\t%s\t%s\t%s\n' "$name" "$status" \
        "$(awk "BEGIN { printf \"%.1f\", $EPOCHREALTIME - $began }")" "$limit" "${*@Q}" | tee -a "$summary"
    cp "$cache"/gemm-*.json "$out" 2>/dev/null
    [[ $(stat -c %s "$log") -le $most ]] || truncate -s "$most" "$log"
}

# each test is named before it runs; one that hangs prints where, and ends its own step only
tests() {
    local name=$1 seconds=$2 chosen=$3
    shift 3
    step "$name" "$seconds" "$python" -m pytest -v -m cuda --tb=short -p no:cacheprovider -o addopts=--strict-markers \
        -o faulthandler_timeout=40 -o faulthandler_exit_on_timeout=true "$@" -k "$chosen"
}

bench() {
    local name=$1 seconds=$2
    shift 2
    step "$name" "$seconds" "$python" -m benchmarks --rounds 10 --out "$rows" "$@"
}

tune() {
    step "$1" "$2" "$python" -m lightning_fp8 tune --rounds 5 --time-limit 15 --shapes "$3"
}

mkdir -p "$cache" && chmod -R go-w "$cache"
[[ ! -d $cubins ]] || cp -u "$cubins"/*.cubin "$cache"
commit=${COMMIT:-$(git describe --always --dirty --exclude='*' 2>/dev/null || echo unknown)}
printf '# stage %s, commit %s, %s\n' "$stage" "$commit" "$(date -u +%FT%TZ)" | tee -a "$log" >>"$summary"
printf 'step\tstatus\tseconds\tlimit\tcommand\n' >>"$summary"
step machine 15 nvidia-smi
case $stage in
    1)
        step versions 20 "$python" -c 'import sys, importlib.metadata as m; print(sys.version, *sorted({f"{d.name}=={d.version}" for d in m.distributions()}), sep="\n")'
        step "doctor quick" 45 "$python" -m lightning_fp8 doctor --quick
        step doctor 150 "$python" -m lightning_fp8 doctor --time-limit 20
        tests "casts, every bit pattern" 45 "bit_pattern" tests/ops/test_cuda.py
        tests "casts, ragged; weights; scales" 45 "ragged or weights_and_scales" tests/ops/test_cuda.py
        tune "tune 8192x4096x16384" 120 8192x4096x16384
        bench "cast 8192x8192" 60 --suite cast --case "8192x8192 bf16->e4m3 cast_transpose"
        ;;
    2)
        tests "GEMM self-tests" 90 "self_test" tests/ops/test_cuda_gemm.py
        tests "GEMM random shapes" 90 "random_shapes" tests/ops/test_cuda_gemm.py
        tests "GEMM splits" 45 "splits" tests/ops/test_cuda_gemm.py
        tests "GEMM load, graph" 120 "not (self_test or random_shapes or splits or block)" \
            tests/ops/test_cuda_gemm.py
        tests "casts and GEMMs in blocks" 45 "block" tests/ops/test_cuda_gemm.py
        tests "graphs, threads, no waiting" 120 \
            "not (self_test or theirs or bit_pattern or ragged or reduced_overhead)" tests/ops/test_cuda.py
        ;;
    3)
        bench "fprop 8192x16384x4096" 40 --suite gemm --case "fprop 8192x16384x4096"
        bench "dgrad 8192x4096x16384" 40 --suite gemm --case "dgrad 8192x4096x16384"
        bench "wgrad 16384x4096x8192" 40 --suite gemm --case "wgrad 16384x4096x8192"
        bench "GEMMs in blocks" 45 --suite blocks --case "in blocks 8192x"
        bench "small GEMMs" 40 --suite gemm --case "2048x1024x1024"
        bench "linear-GELU-linear" 120 --suite linear --case GELU
        bench "linear 8192, 4096 to 16384" 60 --suite linear --case "8192 tokens, 4096 -> 16384"
        bench "gelu cast 8192x14336" 60 --suite cast --case "8192x14336 bf16->e4m3 gelu"
        bench launch 30 --suite launch
        ;;
    4)
        tune "tune 8192x16384x4096" 90 8192x16384x4096
        tune "tune 8192x4096x4096 and 2048x1024x4096" 120 8192x4096x4096,2048x1024x4096
        bench "casts in blocks" 20 --suite blocks --case "cast 8192x8192"
        step "profile of a GEMM" 60 ncu --set full -k regex:gemm_sm -c 2 \
            "$python" -m benchmarks --rounds 1 --suite gemm --case "fprop 8192x16384x4096"
        step "profile of a cast" 60 ncu --set full -k regex:cast_transpose -c 2 \
            "$python" -m benchmarks --rounds 1 --suite cast --case "8192x8192 bf16->e4m3 cast_transpose"
        step "memory check of split GEMMs" 90 compute-sanitizer --tool memcheck --error-exitcode 1 \
            "$python" -m pytest -v -m cuda -p no:cacheprovider -o addopts=--strict-markers tests/ops/test_cuda_gemm.py \
            -k "splits and 2"
        step "memory check of ragged casts" 60 compute-sanitizer --tool memcheck --error-exitcode 1 \
            "$python" -m pytest -v -m cuda -p no:cacheprovider -o addopts=--strict-markers tests/ops/test_cuda.py \
            -k "ragged and 71"
        ;;
esac
rm -rf "$private"
exit "$failed"
