# Sourced by launch_train.sh and train_eagle3_and_export.sh: flags of convert_model.py for each --algorithm, and checks.
differences() { # file of recorded options, those given: what differs
  { diff <(tr ' ' '\n' < "$1") <(tr ' ' '\n' <<< "$2") || true; } | sed -n 's/^< /recorded /p; s/^> /given /p' | paste -sd, | sed 's/,/, /g'
}
seen=""
given() { # flag, words left, value: refuses a missing or empty one, and names one that is replaced
  [ "$2" -ge 2 ] && [ -n "$3" ] || fail "$1 needs a value"
  [[ "$seen " != *" $1 "* ]] || echo "$1 $3 replaces the one given before it" >&2
  seen="$seen $1"
}
number() { [[ $2 =~ ^[1-9][0-9]*$ ]] || fail "$1 $2: expected a positive integer"; } # flag, value
half_of() { # file of recorded options, /proc/cpuinfo; sets `half`: a run keeps the arithmetic that it began with
  half=()
  if [ -f "$1" ]; then
    [[ " $(cat "$1") " != *" half=--bf16 "* ]] || half=(--bf16)
  elif grep -qsE 'avx512_bf16|amx_bf16' "$2"; then # twice the speed of fp32
    half=(--bf16)
  fi
  if [ ${#half[@]} -eq 0 ]; then return; fi
  if grep -qsE 'avx512_bf16|amx_bf16' "$2"; then
    echo "this CPU computes in bf16: it writes the answers and trains in bf16, and validates in fp32"
  else
    echo "this run began in bf16 and goes on in it, which is slow on this CPU: another --output begins in fp32"
  fi
}
draft_flags() { # algorithm, file of overrides or ''; sets `kind`
  case $1 in
    medusa) kind=(--export-algorithm medusa) ;;
    dflash|dspark) kind=(--export-algorithm "$1" ${2:+--draft-config "$2"}) ;;
    mtp-from-base) kind=(--export-algorithm eagle --export-eagle-algorithm eagle-mtp --mtp-from-base) ;;
    eagle3|eagle3.1|eagle1|eagle-mtp|p-eagle)
      kind=(--export-algorithm eagle --export-eagle-algorithm "$1" ${2:+--eagle-config "$2"}) ;;
    eagle2) fail "--algorithm eagle2: EAGLE-2 is EAGLE-1 decoded with a dynamic tree: train eagle1, decode with validate.py --use-dynamic-tree" ;;
    *) fail "--algorithm $1: expected eagle3, eagle3.1, eagle1, eagle-mtp, mtp-from-base, p-eagle, medusa, dflash or dspark" ;;
  esac
}
