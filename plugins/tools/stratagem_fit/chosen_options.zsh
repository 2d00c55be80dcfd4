# The options of plugins that a line may set: those of the plugins that it chooses.
typeset -gA _stratagem_takes=(@TABLE@)
_stratagem_of_chosen() {
  local -A chosen
  local i word name array spec rest takes kind key
  for ((i = 1; i < CURRENT; i++)); do
    word=$words[i]
    if [[ $word == --trainer.*=* ]]; then
      chosen[${${word%%=*}#--trainer.}]=${word#*=}
    elif [[ $word == --trainer.* ]]; then
      chosen[${word#--trainer.}]=$words[i+1]
    fi
  done
  for name in @COMMANDS@; do
    array=_shtab_stratagem_${name}_options
    local -a kept=()
    for spec in "${(@P)array}"; do
      rest=${${spec%%\[*}#--trainer.}
      if [[ $spec == --trainer.?*.?*\[* ]]; then
        kind=${rest%%.*}
        key="$kind $chosen[$kind]"
        takes=$_stratagem_takes[$key]
        [[ -n $takes && $takes != *" ${rest#*.} "* ]] && continue
      fi
      kept+=("$spec")
    done
    local -a $array
    set -A $array "${kept[@]}"
  done
  _shtab_stratagem "$@"
}
