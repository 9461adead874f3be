#!/bin/bash
#SBATCH --job-name=run-tokenize
#SBATCH --output=jobs/run-tokenize/logs/%x-%j.log
#SBATCH --open-mode=append
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=32
#SBATCH --cpus-per-task=1
#SBATCH --mem=0
#SBATCH --time=12:00:00
#SBATCH --partition=gpu
#SBATCH --signal=B:USR2@120
#SBATCH --requeue

# Written by `dtt submit`. From the same folder, `sbatch jobs/run-tokenize/slurm.sh` runs it again: it goes on
# where it was. 120 s before the time limit it lets dtt save; then Slurm continues the job:
# requeue. docs/slurm.md tells the rest.
# shellcheck disable=SC1091,SC2034,SC2329  # what it sources; what nodes and traps use

set -u
limit='slurm: time limit'
directory=/scratch/me/dtt
job=jobs/run-tokenize
command=(tokenize -c jobs/run-tokenize/config.yaml)
tag=$SLURM_JOB_ID-r${SLURM_RESTART_COUNT:-0}
host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((10000 + (SLURM_JOB_ID + 7919 * ${SLURM_RESTART_COUNT:-0}) % 20000))
while (: <"/dev/tcp/127.0.0.1/$port") 2>/dev/null; do ((port++)); done # somebody listens there

say() { printf '%s slurm: %s\n' "$(date +%T)" "$*"; }

# ---- on every node -----------------------------------------------------------------------------

set_up() {
    set +u
    source env.sh || return
    return 0
}

processes() {
    cd -- "$directory" || exit 66
    exec >>"$job/logs/$log-${SLURMD_NODENAME:-$(hostname)}.log" 2>&1
    if ! set_up; then
        echo "slurm: cannot set up $(hostname)" >&2
        exit 78
    fi
    exec python -m "$@"
}

# launch NAME MODULE [ARGUMENT]…: run it on all nodes; sets `status`. Each node has a log of its own.
launch() {
    local name=$1 log=$1-$tag node
    shift
    for node in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
        ln -sfn -- "$log-$node.log" "$job/logs/latest-$node.log"
    done
    ln -sfn -- "$log-$host.log" "$job/logs/latest.log"
    say "$name on $SLURM_JOB_NODELIST: see $job/logs/latest.log"
    srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node=32 \
        --cpus-per-task=1 \
        --mpi=pmix \
        bash -c "$(declare -p directory job log tag host port)
            $(declare -f set_up processes)
            processes \"\$@\"" bash "$@" &
    step=$!
    # A signal ends `wait` early; asked again, it still knows how the step ended.
    while kill -0 "$step" 2>/dev/null; do wait "$step"; done
    wait "$step"
    status=$?
}

# ---- what the job directory and Slurm tell -----------------------------------------------------

# The largest number behind this path; -1 if there is none.
largest() {
    local path number best=-1
    for path in "$1"*; do
        number=${path#"$1"}
        if [[ $number =~ ^[0-9]+$ ]] && ((10#$number > best)); then best=$((10#$number)); fi
    done
    echo "$best"
}

field() { scontrol show job "$SLURM_JOB_ID" | sed -n "s/.*\<$1=\([^ ]*\).*/\1/p" | head -n 1; }

running() { [[ $(field JobState) == RUNNING ]]; }

# Whether another job takes our place. In its grace period Slurm signals the ranks but not this
# script, and if they end by themselves it does not requeue the job.
preempted() {
    local since
    since=$(field PreemptTime)
    [[ $since == [0-9]* && ! $since < $(field StartTime) ]]
}

# ---- signals -----------------------------------------------------------------------------------

asked='' # why we asked for a stop; empty when nobody or somebody else did
step=''
successor=''

ask() {
    asked=$1
    [[ -z $step ]] || kill -TERM "$step" 2>/dev/null
}

# A request of ours that nobody was left to hear is not meant for another attempt.
drop_request() {
    if [[ -e $job/control/stop && $(head -n 1 "$job/control/stop") == slurm:* ]]; then
        rm -f -- "$job/control/stop"
    fi
}

on_limit() {
    say "the time limit is near: asking to save and stop"
    ask "$limit"
}

on_term() {
    say "got SIGTERM"
    ask 'slurm: SIGTERM'
}

trap on_limit USR2
trap on_term TERM

# leave CODE MESSAGE…: the end of this job.
leave() {
    trap '' USR2 TERM
    local code=$1
    shift
    say "$*"
    drop_request
    exit "$code"
}

# ---- this attempt ------------------------------------------------------------------------------

cd -- "$directory" || exit 66
mkdir -p -- "$job/logs" "$job/control"
ln -sfn -- "$SLURM_JOB_NAME-$SLURM_JOB_ID.log" "$job/logs/latest-slurm.log"
drop_request

# `stalled` holds the newest checkpoint's step and how many attempts in a row began with it.
before=$(largest "$job/checkpoints/step-")
stalled=0
if [[ -s $job/stalled && (${1:-} == continued || ${SLURM_RESTART_COUNT:-0} != 0) ]]; then
    read -r last stalled <"$job/stalled"
    [[ $last == "$before" && $stalled =~ ^[0-9]+$ ]] || stalled=0
fi
give_up="3 attempts in a row did not finish: see logs/latest.log, then sbatch jobs/run-tokenize/slurm.sh"
if ((stalled >= 3)); then leave 1 "$give_up"; fi
printf '%s %s\n' "$before" "$((++stalled))" >"$job/stalled"

attempt=$(largest "$job/attempts/")
status=78
if set_up; then
    set -u
    launch tokenize dtt.main "${command[@]}"
else
    say "cannot set up $(hostname)"
fi

# ---- how it ended, and whether it goes on ------------------------------------------------------

code=$status
((code <= 128)) || code=none
last=$(largest "$job/attempts/")
if ((last > attempt)); then # torchrun says 1 for everything; this is the truth
    told=$(sed -n 's/^ *"code": *\([0-9][0-9]*\).*/\1/p' "$job/attempts/$last/exit.json" 2>/dev/null)
    if [[ -n $told ]]; then code=$told status=$told; fi
fi

case $code in
0) leave 0 "done" ;;
2 | 65 | 66 | 76 | 130) leave "$status" "exit code $code: mend what it says, then sbatch jobs/run-tokenize/slurm.sh" ;;
esac
if [[ $asked != "$limit" ]] && ! { preempted && running; }; then
    if [[ -n $asked ]]; then
        say "exit code $code after SIGTERM: whether the job goes on is Slurm's to say"
        trap '' USR2 TERM
        exit "$status"
    fi
    [[ $code != 75 ]] || leave 75 "stopped on request, all is saved; sbatch jobs/run-tokenize/slurm.sh goes on"
fi
if [[ $(largest "$job/checkpoints/step-") == "$before" ]] && ((stalled >= 3)); then
    leave "$status" "exit code $code; $give_up"
fi
if ! running; then leave "$status" "exit code $code; the job was cancelled"; fi
trap '' USR2 TERM # a requeue sends them, too
say "exit code $code; back into the queue"
scontrol requeue "$SLURM_JOB_ID" || leave "$status" "cannot be requeued: sbatch jobs/run-tokenize/slurm.sh goes on"
exit "$status"
