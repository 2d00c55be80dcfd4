# The options of plugins that a line may set: those of the plugins that it chooses.
declare -gA _stratagem_takes=(@TABLE@)
_stratagem_of_chosen() {
  _shtab_stratagem "$@"
  local -A chosen=()
  local i word value kept=() rest takes
  for ((i = 0; i < COMP_CWORD; i++)); do
    word="${COMP_WORDS[i]}"
    [[ $word == --trainer.* ]] || continue
    value="${COMP_WORDS[i + 1]}"
    [[ $value == "=" ]] && value="${COMP_WORDS[i + 2]}"
    [[ $word == *=* ]] && value="${word#*=}" word="${word%%=*}"
    chosen["${word#--trainer.}"]="$value"
  done
  for word in "${COMPREPLY[@]}"; do
    rest="${word#--trainer.}"
    if [[ $word == --trainer.?*.?* ]]; then
      takes="${_stratagem_takes["${rest%%.*} ${chosen["${rest%%.*}"]}"]}"
      [[ -n $takes && $takes != *" ${rest#*.} "* ]] && continue
    fi
    kept+=("$word")
  done
  COMPREPLY=("${kept[@]}")
}
