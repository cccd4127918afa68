#!/usr/bin/env bash
# What one large GPU has to show: see README.md beside this. Run it in the repository's root, in an environment with
# torch for CUDA, transformers, triton and pytest:
#
#     docs/gpu/check.sh OUT [PYTHON] [PART ...]
#
# Files and logs go to the folder OUT; PARTs are exact, kernels, memory and large, all by default. A part that fails
# does not stop the next one; the exit status says whether any has. With DEVICE=cpu in the environment the script is
# tried at a tiny shape.
set -uo pipefail

out=${1:?usage: docs/gpu/check.sh OUT [PYTHON] [PART ...]}
python=${2:-python3}
parts=${*:3}
mkdir -p "$out"
failed=0
device=${DEVICE:-cuda}
middle=7b large=27b quick=
if [[ $device == cpu ]]; then
    middle=tiny large=tiny quick=--quick
fi
export PYTHONPATH=$PWD PYTHONSAFEPATH=1 TOKENIZERS_PARALLELISM=false
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True # what fits should not depend on how memory was cut up before

part() { # NAME SECONDS COMMAND ...
    local name=$1 limit=$2
    shift 2
    if [[ -n "$parts" && " $parts " != *" ${name%%-*} "* ]]; then
        return
    fi
    echo "== $name: $*"
    if timeout "$limit" "$@" > "$out/$name.log" 2>&1; then
        echo "   passed, $SECONDS s since the start; the end of $out/$name.log:"
    else
        echo "   FAILED or out of time (exit status $?), $SECONDS s since the start; the end of $out/$name.log:"
        failed=1
    fi
    tail -n 40 "$out/$name.log"
}

train() { # NAME SECONDS OPTION ...
    local name=$1 limit=$2
    shift 2
    part "$name" "$limit" "$python" -P -m trainer.bench_train --device "$device" --json "$out/$name.json" "$@"
}

part exact 120 "$python" -P docs/gpu/exact.py ${DEVICE:-}
for rank in 64 256; do # of Qwen2.5-7B's widest layer
    part "kernels-$rank" 120 "$python" -P -m trainer.bench_kernels --device "$device" --rounds 3 $quick \
        --rows 18944 --columns 3584 --tokens 8192 --rank $rank --json "$out/kernels-$rank.json"
done
train memory-bfloat16 240 --shapes $middle --dtypes bfloat16 --ranks 256 --rounds 1 --steps 3
train memory-float32 420 --shapes $middle --dtypes float32 --ranks 256 --kinds sketch --rounds 1 --steps 1
train large 420 --shapes $large --dtypes bfloat16 --ranks 256 --kinds sketch --rounds 1 --steps 20
exit $failed
