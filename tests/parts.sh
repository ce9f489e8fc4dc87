#!/usr/bin/env bash
# Run parts of the test suite (lint unit live gloo mutants nbval browser), say how long each took, fail if one failed.
cd "$(dirname "$0")/.." || exit 1
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" MPLBACKEND=agg PYTHONHASHSEED=0
bin=.venv/bin
skip_slow=" and not slow"
[ -n "$SLOW" ] && skip_slow=""

lint() {
  $bin/ruff check . && $bin/ruff format --check . && $bin/python -m gpt2lab.lessons.build --check
}
unit() { $bin/pytest tests -m "not live and not mutant and not browser$skip_slow"; }
live() { $bin/pytest tests -m "live and not mutant and not browser$skip_slow" --durations 12; }
# The other transport, which carries every run on several machines: all calls, all faults, all pairs of strategies, and
# of each strategy what shows it equal to the serial run or to PyTorch's own. Bytes, memory and times are counted above
# the transport, so they are the same over both and stay in `live`.
gloo() {
  local status=0 equality="equal or same or serial or bit or compose or accumulation or parallelism or fewer or groups"
  equality+=" or rows or length or uneven or dtensor"
  GPT2LAB_BACKEND=gloo $bin/pytest -m "live and not mutant$skip_slow" \
    tests/test_comm.py tests/test_algorithms.py tests/test_strided.py tests/faults/test_ranks_fail.py \
    tests/equivalence || status=1
  GPT2LAB_BACKEND=gloo $bin/pytest -m "live and not mutant$skip_slow" -k "$equality" --durations 5 \
    tests/test_data.py tests/test_zero.py tests/test_lecture_zero3.py tests/test_tensor.py tests/test_sequence.py tests/test_pipeline.py \
    tests/test_context.py tests/test_halo.py tests/test_verify.py tests/test_plan_choices.py || status=1
  return $status
}
mutants() { $bin/pytest tests -m "mutant and not browser$skip_slow"; }
browser() { $bin/pytest tests/browser -rs; }

# Solutions strictly (text must be equal), student versions leniently (Run All reaches the end), side by side.
nbval() {
  local log status=0
  log=$(mktemp)
  GPT2LAB_STATIC=1 $bin/pytest --nbval-lax notebooks/*.ipynb --nbval-cell-timeout 120 --timeout 600 >"$log" 2>&1 &
  local students=$!
  GPT2LAB_STATIC=1 GPT2LAB_STRICT=1 \
    $bin/pytest --nbval notebooks/solutions/*.ipynb --nbval-cell-timeout 120 --timeout 600 --durations 5 || status=1
  wait $students || status=1
  echo "student versions:"
  cat "$log"
  rm -f "$log"
  return $status
}

failed=() table=""
begin=$SECONDS
for part in "$@"; do
  echo "== $part"
  start=$SECONDS
  if "$part"; then verdict=ok; else verdict=FAILED; failed+=("$part"); fi
  table+=$(printf '  %-8s %5d s  %s' "$part" $((SECONDS - start)) "$verdict")$'\n'
done
printf '\n%s  %-8s %5d s\n' "$table" total $((SECONDS - begin))
if [ ${#failed[@]} -gt 0 ]; then
  echo "Failed: ${failed[*]}"
  exit 1
fi
