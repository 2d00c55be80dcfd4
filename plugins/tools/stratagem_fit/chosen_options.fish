# Condition helper: true if the plugin of kind $argv[1] that the line chooses takes the option $argv[2].
function _stratagem_takes
  set -l tokens (commandline -opc)
  set -l chosen
  for i in (seq (count $tokens))
    if test "$tokens[$i]" = "--trainer.$argv[1]"
      set chosen $tokens[(math $i + 1)]
    else if string match -q -- "--trainer.$argv[1]=*" "$tokens[$i]"
      set chosen (string split -m 1 -f 2 = -- "$tokens[$i]")
    end
  end
  switch "$argv[1] $chosen"
@CASES@
    case '*'
      return 0
  end
end
