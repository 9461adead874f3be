#!/usr/bin/env bash
# Runs a command in dtt's own environment, which is made first and kept up to date.
#
#   ./env.sh dtt --help   make or update .venv beside this file, then run `dtt --help` in it
#   ./env.sh pytest       the same with the developers' tools; also ruff, mypy, coverage, lint-imports
#   ./env.sh              only make or update
#   source env.sh         make or update, then activate: in a shell (bash, zsh) or a job script
#
# Needs Python 3.11 or newer and nothing else; takes milliseconds when nothing has changed.
# Installs with uv (the one on PATH, else its own) and, where that fails, with pip.
#
# Chosen when .venv is made and kept until it is removed:
#   Python   python3, or the newest that fits; or DTT_PYTHON=/path/to/python ./env.sh
#   torch    the CPU build, or with a GPU the build for it; a login node without the GPUs of its
#            cluster is told: UV_TORCH_BACKEND=cu130 ./env.sh (uv's names: auto, cpu, cu…, rocm…)
#   MPI      the machine's own where there is an mpirun, else MPICH from a wheel

if [[ "${BASH_SOURCE[0]:-}" != "$0" ]]; then # sourced: a child does the work, so nothing leaks
    # shellcheck source=/dev/null
    bash "${BASH_SOURCE[0]:-$0}" true &&
        . "$(dirname -- "${BASH_SOURCE[0]:-$0}")/.venv/bin/activate"
    return
fi

set -euo pipefail
root=$(cd -P -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
venv=$root/.venv
stamp=$venv/.dtt # two lines, how .venv was made and what it holds; empty during an install
sources=$(cat "$root/pyproject.toml" "$root/env.sh" | cksum)
command="${*} "

say() { printf 'env.sh: %s\n' "$*" >&2; }

# Compare what there is with what is wanted; a choice once made stands unless it is asked for anew.
up_to_date() {
    old_made='' old_holds=''
    [[ ! -f $stamp ]] || { read -r old_made && read -r old_holds; } <"$stamp" || true
    IFS='|' read -r python backend _ <<<"$old_made"
    IFS='|' read -r extras _ <<<"$old_holds"
    python=${DTT_PYTHON:-$python}
    backend=${UV_TORCH_BACKEND:-$backend}
    case $command in
    pytest\ * | ruff\ * | mypy\ * | lint-imports\ * | coverage\ * | python\ -m\ pytest\ *)
        [[ $extras == *dev* ]] || extras+=,dev ;;
    esac
    [[ "$python|$backend|$root" == "$old_made" && "$extras|$sources" == "$old_holds" &&
        -x $venv/bin/python ]]
}

find_python() {
    local candidates=(python3 python3.14 python3.13 python3.12 python3.11)
    [[ -z ${DTT_PYTHON:-} ]] || candidates=("$DTT_PYTHON")
    for python in "${candidates[@]}"; do
        if "$python" -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
        then return; fi
    done
    say "no Python 3.11 or newer with its venv module: tried ${candidates[*]}"
    say "install one (Debian, Ubuntu: apt install python3-venv) or name it: DTT_PYTHON=/path ./env.sh"
    return 1
}

make_venv() {
    find_python || return 1
    if [[ -L $venv && -n $(ls -A -- "$venv/" 2>/dev/null) ]]; then
        say ".venv is a link to $(readlink -- "$venv"), which is another environment: it is left alone"
        say "remove the link, or that folder, and run this again"
        return 1
    fi
    say "making .venv with $("$python" --version), $python"
    if [[ -L $venv ]]; then # to a disk with more space
        (cd -- "$root" && mkdir -p -- "$(readlink .venv)")
    else
        rm -rf -- "$venv"
        mkdir -- "$venv"
    fi
    : >"$stamp"
    "$python" -m venv "$(cd -- "$venv" && pwd -P)" # it makes none at a link
}

choose() {
    if [[ -z $backend ]]; then
        backend=cpu
        if nvidia-smi >/dev/null 2>&1 || [[ -e /dev/kfd ]]; then backend=auto; fi
    fi
    if [[ $extras != *mpi* ]]; then
        if command -v mpirun >/dev/null; then extras=mpi$extras; else extras=mpich$extras; fi
    fi
}

# Where PyTorch's own index is out of reach, torch comes from find-links or the usual index.
# Bytecode is compiled once here: else every process may do it anew, at seconds a start.
install() {
    local index=https://download.pytorch.org/whl from='' quiet=--quiet uv limit=''
    if "$venv/bin/python" -c "import urllib.request as u; u.urlopen('$index/cpu/', timeout=5)" \
        2>/dev/null; then from=$backend; fi
    # The release that all tests run with. Where PyTorch's index is out of reach, newer ones are only
    # to be had as GPU builds: 5.5 GB with their libraries, instead of 200 MB.
    [[ $backend != cpu ]] || limit='torch<2.14'
    printf '%s\n' "$limit" >"$venv/constraints.txt"
    [[ ! -t 2 ]] || quiet=''
    uv=$(command -v uv) || uv=$venv/bin/uv
    say "installing dtt[$extras], torch for $backend${from:+ from $index}"
    cd -- "$root" || return
    [[ -x $uv ]] || "$venv/bin/python" -m pip install -qq uv || say "uv is not to be had"
    env -u UV_TORCH_BACKEND UV_NO_SOURCES=1 UV_FIND_LINKS="${PIP_FIND_LINKS:-}" \
        "$uv" pip install $quiet --compile-bytecode ${from:+--torch-backend "$from"} \
        --python "$venv/bin/python" -c "$venv/constraints.txt" -e ".[$extras]" && return
    say "trying pip instead"
    [[ $from != auto ]] || from='' # what pip takes by itself is a GPU build
    "$venv/bin/python" -m pip install $quiet -c "$venv/constraints.txt" \
        ${from:+--extra-index-url "$index/$from"} -e ".[$extras]"
}

update() {
    PATH=${PATH//"$venv/bin:"/} # whichever shell calls, .venv is not made from itself
    local fresh=''
    if [[ -f $stamp && "$python|$backend|$root" != "$old_made" ]] ||
        ! "$venv/bin/python" -c '' 2>/dev/null; then fresh=yes; fi
    if [[ -n $fresh ]]; then make_venv || return 1; fi
    choose
    : >"$stamp"
    if install >&2; then
        printf '%s\n' "$python|$backend|$root" "$extras|$sources" >"$stamp"
        say "done in $SECONDS s"
        return
    fi
    # What was there and worked still does; what was begun will be begun again.
    if [[ -z $fresh && -n $old_made ]]; then printf '%s\n' "$old_made" "$old_holds" >"$stamp"; fi
    if [[ -z $fresh && -z $old_made ]]; then rm -- "$stamp"; fi
    say "could not install; the reason is above"
    return 1
}

if ! up_to_date; then
    ( # one at a time; whoever waited finds the work done
        ! command -v flock >/dev/null || flock 9
        up_to_date || update
    ) 9>"$root/.venv.lock"
    up_to_date
fi
if [[ $backend == cpu && -e /dev/nvidia0 && -z ${UV_TORCH_BACKEND:-} ]]; then
    say "a GPU is here, but .venv holds torch for cpu: UV_TORCH_BACKEND=auto ./env.sh changes it"
fi

export VIRTUAL_ENV=$venv PATH=$venv/bin:$PATH
unset PYTHONHOME
if [[ $# -gt 0 ]]; then exec "$@"; else say "ready: ./env.sh COMMAND, or source env.sh"; fi
