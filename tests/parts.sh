#!/usr/bin/env bash
# Run parts of the test suite, one after the other; `unit+mutants` runs parts side by side, for half of the time they
# wait. Say how long each took, fail if one failed.
cd "$(dirname "$0")/.." || exit 1
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" MPLBACKEND=agg PYTHONHASHSEED=0
bin=.venv/bin
skip_slow=" and not slow"
[ -n "$SLOW" ] && skip_slow=""

lint() {
  $bin/ruff check . && $bin/ruff format --check . && $bin/python -m gpt2lab.lessons.build --check
}
unit() { $bin/pytest tests -m "not live and not mutant and not browser$skip_slow"; }
live() { $bin/pytest tests --ignore tests/faults -m "live and not mutant and not browser$skip_slow" --durations 12; }
faults() { $bin/pytest tests/faults -m "live and not mutant$skip_slow" --durations 5; }
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

# Solutions strictly: text must be equal. Student versions leniently: Run All reaches the end.
notebooks() { GPT2LAB_STATIC=1 $bin/pytest "$@" --nbval-cell-timeout 120 --timeout 600; }
solutions() { GPT2LAB_STRICT=1 notebooks --nbval notebooks/solutions/*.ipynb --durations 5; }
students() { notebooks --nbval-lax notebooks/*.ipynb; }

# Run a part; its line of the table goes to a file.
timed() {
  local start=$SECONDS verdict=ok
  "$1" || verdict=FAILED
  printf '  %-9s %5d s  %s\n' "$1" $((SECONDS - start)) $verdict >"$logs/$1.line"
}

begin=$SECONDS
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
for word in "$@"; do
  IFS=+ read -ra parts <<<"$word"
  for part in "${parts[@]:1}"; do timed "$part" >"$logs/$part" 2>&1 & done
  echo "== ${parts[0]}"
  timed "${parts[0]}"
  wait
  for part in "${parts[@]:1}"; do printf '== %s\n' "$part" && cat "$logs/$part"; done
  for part in "${parts[@]}"; do cat "$logs/$part.line" >>"$logs/table"; done
done
printf '\n%s\n  %-9s %5d s\n' "$(cat "$logs/table")" total $((SECONDS - begin))
failed=$(awk '$NF == "FAILED" { print $1 }' "$logs/table" | paste -sd ' ')
if [ -n "$failed" ]; then
  echo "Failed: $failed"
  exit 1
fi
