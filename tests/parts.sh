#!/usr/bin/env bash
# Run parts of the test suite, one after the other. `unit,live+faults,gloo` runs two lanes side by side, because parts
# wait half of the time: unit and then live in one, faults and then gloo in the other.
# Say how long each took and which tests took longest; fail if one failed.
cd "$(dirname "$0")/.." || exit 1
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" MPLBACKEND=agg PYTHONHASHSEED=0
export PYTHONPATH="${PYTHONPATH:+$PYTHONPATH:}$PWD/tests"
bin=.venv/bin
skip_slow=" and not slow"
[ -n "$SLOW" ] && skip_slow=""

# Seconds that a part may take on two quiet cores, beside its neighbour in `make test`. Raise one only with a reason.
declare -A budget=([lint]=20 [unit]=150 [mutants]=180 [live]=300 [faults]=240 [gloo]=150 [lessons]=270 [browser]=150
  [quick]=40)

tests() { $bin/pytest -p slowest "$@"; }

lint() {
  $bin/ruff check . && $bin/ruff format --check . && $bin/python -m gpt2lab.lessons.build --check
}
unit() { tests tests -m "not live and not mutant and not browser$skip_slow"; }
live() { tests tests --ignore tests/faults -m "live and not mutant and not browser$skip_slow"; }
faults() { tests tests/faults -m "live and not mutant$skip_slow"; }
# One live test a strategy.
quick() { tests tests/equivalence/test_equal.py tests/test_verify.py -k "not plan or each"; }
# The other transport, which carries every run on several machines: all calls, all faults, and of each strategy one plan
# and each pair of strategies. Numbers, bytes, memory and times are made and counted above the transport, so they are
# the same over both and stay in `live`; `make test-all` runs over gloo all that shows a strategy equal to serial.
gloo() {
  local files=(tests/test_comm.py tests/test_algorithms.py tests/test_strided.py tests/faults/test_ranks_fail.py
    tests/equivalence)
  [ -n "$SLOW" ] && files+=(tests/test_data.py tests/test_zero.py tests/test_lecture_zero3.py tests/test_tensor.py
    tests/test_sequence.py tests/test_pipeline.py tests/test_context.py tests/test_halo.py tests/test_verify.py
    tests/test_plan_choices.py tests/test_gspmd.py tests/test_hsdp.py tests/test_named.py tests/test_versions.py
    tests/test_asynchronous_labs.py tests/test_stale_gradients.py tests/test_placement_lab.py
    tests/test_operators_live.py tests/test_products.py tests/test_tofu.py tests/test_staged.py tests/test_automatic_lab.py)
  GPT2LAB_BACKEND=gloo tests "${files[@]}" -m "live and not mutant$skip_slow"
}
mutants() { tests tests -m "mutant and not browser$skip_slow"; }
gpu() { tests tests/test_devices.py tests/test_gpu.py -m gpu -rs; }
browser() { tests tests/browser -m "browser$skip_slow" -rs; }

notebooks() {
  GPT2LAB_STATIC=1 tests -p no_address_parser -p nbval "$@" --nbval-cell-timeout 120 --timeout 600
}
# Solutions strictly: text must be equal. Then, in the same kernel, what is otherwise for students: no cell may fail.
# `make test-all` also runs the notebooks of students by themselves, from the first cell to the last.
lessons() {
  local folder status=0
  folder=$(mktemp -d)
  $bin/python tests/run_all.py "$folder" && GPT2LAB_STRICT=1 notebooks --nbval "$folder"/*.ipynb || status=1
  rm -rf "$folder"
  [ -z "$SLOW" ] || notebooks --nbval-lax notebooks/*.ipynb || status=1
  return $status
}

# Run a part; its line of the table goes to a file.
timed() {
  local start=$SECONDS verdict=ok took note=""
  "$1" || verdict=FAILED
  took=$((SECONDS - start))
  [ -z "$SLOW" ] && [ "$took" -gt "${budget[$1]:-900}" ] && note="over its budget of ${budget[$1]} s  "
  printf '  %-9s %5d s  %s%s\n' "$1" $took "$note" $verdict >"$logs/$1.line"
}

begin=$SECONDS
logs=$(mktemp -d)
export TEST_SECONDS="$logs/seconds"
touch "$TEST_SECONDS"
trap 'rm -rf "$logs"' EXIT
# One part after the other.
lane() {
  for part in ${1//,/ }; do
    echo "== $part"
    timed "$part" 2>&1
  done
}

for word in "$@"; do
  IFS=+ read -ra lanes <<<"$word"
  for number in "${!lanes[@]}"; do
    [ "$number" -eq 0 ] || lane "${lanes[number]}" >"$logs/$number" &
  done
  lane "${lanes[0]}"
  wait
  for number in "${!lanes[@]}"; do [ "$number" -eq 0 ] || cat "$logs/$number"; done
  for part in ${word//[+,]/ }; do cat "$logs/$part.line" >>"$logs/table"; done
done
[ -s "$TEST_SECONDS" ] && printf '\nThe slowest tests of all:\n' && sort -rn "$TEST_SECONDS" | head -10
printf '\n%s\n  %-9s %5d s\n' "$(cat "$logs/table")" total $((SECONDS - begin))
failed=$(awk '$NF == "FAILED" { print $1 }' "$logs/table" | paste -sd ' ')
if [ -n "$failed" ]; then
  echo "Failed: $failed"
  exit 1
fi
