"""A script by which a shell completes `asyncrl`: commands, options, CONFIG files, key= names, and values of a choice.

Everything stands in the script, so that the Tab key starts no Python.
"""

from __future__ import annotations

import typing
from collections.abc import Collection, Mapping, Sequence

from asyncrl.config.commented_yaml import key_comments
from asyncrl.config.load import all_keys, hint_of
from asyncrl.config.remedies import kinds

BASH = """\
# bash completion of asyncrl, made by `asyncrl completion bash`
_asyncrl() {
  local line="${COMP_LINE:0:COMP_POINT}" word command words
  word="${line##*[[:space:]]}"
  command="${COMP_WORDS[1]}"
  if [[ " @GROUPS@ " == *" $command "* && $COMP_CWORD -eq 2 ]]; then
    case "$command" in
@BELOW@
    esac
    [[ " @ALONE@ " == *" $command "* ]] || return
  fi
  if (( COMP_CWORD == 1 )); then
    COMPREPLY=($(compgen -W "@COMMANDS@" -- "$word"))
    return
  fi
  if [[ " @GROUPS@ " == *" $command "* && " ${COMP_WORDS[2]} " != *"="* && $COMP_CWORD -gt 2 ]]; then
    [[ " @PAIRS@ " == *" $command/${COMP_WORDS[2]} "* ]] && command="$command ${COMP_WORDS[2]}"
  fi
  if [[ "$word" == -* ]]; then
    case "$command" in
@OPTIONS@
    esac
    COMPREPLY+=($(compgen -W "--help $words" -- "$word"))
    return
  fi
  if [[ "$word" == *=* && "$word" != */* ]]; then
    case "${word%%=*}" in
@VALUES@
    esac
    COMPREPLY=($(compgen -W "$words" -- "${word#*=}"))
    [[ "$COMP_WORDBREAKS" != *=* ]] && COMPREPLY=("${COMPREPLY[@]/#/${word%%=*}=}")
    return
  fi
  compopt -o filenames 2> /dev/null
  COMPREPLY+=($(compgen -d -- "$word") $(compgen -f -X '!*.yaml' -- "$word") $(compgen -f -X '!*.yml' -- "$word"))
  if [[ " @TAKING@ " == *" ${command// //} "* && $COMP_CWORD -gt 2 && "$word" != */* ]]; then
    local keys=($(compgen -S = -W "@KEYS@" -- "$word"))
    if (( ${#keys[@]} )); then
      compopt -o nospace +o filenames 2> /dev/null
      COMPREPLY+=("${keys[@]}")
    fi
  fi
}
complete -F _asyncrl asyncrl
"""

ZSH = """\
# zsh completion of asyncrl, made by `asyncrl completion zsh`
(( $+functions[compdef] )) || { autoload -U compinit && compinit }
autoload -U +X bashcompinit && bashcompinit
"""


def script(shell: str, options: Mapping[str, Sequence[str]], takes_config: Collection[str]) -> str:
    """The script for 'bash', 'zsh' or 'fish'.

    options: those of each command, also of commands of two words · takes_config: commands before CONFIG key=value …
    """
    return _fish(options, takes_config) if shell == "fish" else _bash(shell, options, takes_config)


def _bash(shell: str, options: Mapping[str, Sequence[str]], takes_config: Collection[str]) -> str:
    pairs = [name.split(" ") for name in options if " " in name]
    groups = dict.fromkeys(first for first, _ in pairs)
    below = [
        f'      {group}) COMPREPLY=($(compgen -W "{" ".join(second for first, second in pairs if first == group)}" '
        '-- "$word")) ;;'
        for group in groups
    ]
    filled = {
        "COMMANDS": " ".join(dict.fromkeys(name.partition(" ")[0] for name in options)),
        "GROUPS": " ".join(groups),
        "PAIRS": " ".join("/".join(pair) for pair in pairs),
        "ALONE": " ".join(group for group in groups if group in options),
        "BELOW": "\n".join(below),
        "OPTIONS": "\n".join(
            f'      "{name}") words="{" ".join(words)}" ;;' for name, words in options.items()
        ),
        "VALUES": "\n".join(
            f'      {key}) words="{" ".join(values)}" ;;' for key, values in choices().items()
        ),
        "TAKING": " ".join(name.replace(" ", "/") for name in options if name in takes_config),
        "KEYS": " ".join(all_keys()),
    }
    text = BASH
    for name, value in filled.items():
        text = text.replace(f"@{name}@", value)
    return (ZSH if shell == "zsh" else "") + text


def _fish(options: Mapping[str, Sequence[str]], takes_config: Collection[str]) -> str:
    lines = ["# fish completion of asyncrl, made by `asyncrl completion fish`"]
    for name, words in options.items():
        first, _, second = name.partition(" ")
        if second:
            lines.append(f"complete -c asyncrl -n '__fish_seen_subcommand_from {first}' -a {second}")
        else:
            lines.append(f"complete -c asyncrl -n __fish_use_subcommand -f -a {first}")
        lines += [
            f"complete -c asyncrl -n '__fish_seen_subcommand_from {first}' -l {word[2:]}" for word in words
        ]
    taking = " ".join(dict.fromkeys(name.partition(" ")[0] for name in options if name in takes_config))
    for key in all_keys():
        about = key_comments().get(key, "").replace("\\", "\\\\").replace("'", "\\'")
        words = " ".join(f"{key}={value}" for value in choices().get(key, ("",)))
        lines.append(
            f"complete -c asyncrl -n '__fish_seen_subcommand_from {taking}' -a '{words}' -d '{about[:80]}'"
        )
    return "\n".join(lines) + "\n"


def choices() -> dict[str, tuple[str, ...]]:
    """Key → the values that it chooses from."""
    found: dict[str, tuple[str, ...]] = {}
    for key in all_keys():
        words: list[str] = []
        for kind in kinds(hint_of(key)):
            if typing.get_origin(kind) is typing.Literal:
                words += [str(word) for word in typing.get_args(kind)]
            elif kind is bool:
                words += ["true", "false"]
            elif kind is type(None) and words:
                words.append("null")
        if words:
            found[key] = tuple(words)
    return found
