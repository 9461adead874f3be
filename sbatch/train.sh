#!/bin/bash
#SBATCH --job-name=run
#SBATCH --output=jobs/run/logs/%x-%j.log
#SBATCH --open-mode=append
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --mem=0
#SBATCH --time=12:00:00
#SBATCH --partition=gpu
#SBATCH --signal=B:USR2@120
#SBATCH --requeue

# Written by `dtt submit`. From the same folder, `sbatch jobs/run/slurm.sh` runs it again: it goes on
# where it was. 120 s before the time limit, or earlier, it lets dtt save; then Slurm continues
# the job: requeue. docs/slurm.md tells the rest.
# shellcheck disable=SC1091,SC2034,SC2329  # what it sources; what nodes and traps use

# What stands beside the lines of set-up begins with `_dtt_`: they cannot change it by accident.
set -u
limit='slurm: time limit'
_dtt_directory=/scratch/me/dtt
_dtt_job=jobs/run
id=$SLURM_JOB_ID
log=$SLURM_JOB_NAME-$id.log
again='sbatch jobs/run/slurm.sh'
trained=$_dtt_job # where its checkpoints are, and requests go
command=(train "$_dtt_job")
_dtt_tag=$SLURM_JOB_ID-r${SLURM_RESTART_COUNT:-0}
_dtt_host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
_dtt_port=$((10000 + (SLURM_JOB_ID + 7919 * ${SLURM_RESTART_COUNT:-0}) % 20000))
while (: <"/dev/tcp/127.0.0.1/$_dtt_port") 2>/dev/null; do ((_dtt_port++)); done # somebody listens there
cd -- "$_dtt_directory" || exit 66

say() { printf '%s slurm: %s\n' "$(date +%T)" "$*"; }

# ---- on every node -----------------------------------------------------------------------------

_dtt_set_up() {
    set +u
    source env.sh || return
    return 0
}

_dtt_unfit() {
    echo "slurm: cannot set up $(hostname)" >&2
    exit 78
}

_dtt_processes() {
    cd -- "$_dtt_directory" || exit 66
    exec >>"$_dtt_job/logs/$_dtt_log-${SLURMD_NODENAME:-$(hostname)}.log" 2>&1
    trap _dtt_unfit EXIT # set-up may fail, or exit; or there is no such program
    _dtt_set_up || exit
    cd -- "$_dtt_directory" || exit
    # The batch script asks for the stop. Whoever starts the ranks must not die of a signal before
    # they have saved; they set handlers of their own.
    trap '' USR2 TERM
    getent hosts "$_dtt_host" >/dev/null || _dtt_host=$SLURM_LAUNCH_NODE_IPADDR
    exec torchrun \
        --nnodes="$SLURM_JOB_NUM_NODES" --nproc_per_node=4 \
        --node_rank="$SLURM_NODEID" --rdzv_endpoint="$_dtt_host:$_dtt_port" --max_restarts=0 \
        --signals_to_handle=SIGINT,SIGHUP,SIGQUIT \
        -m "$@"
}

# launch NAME MODULE [ARGUMENT]…: run it on all nodes; sets `status`. Each node has a log of its own.
launch() {
    local name=$1 _dtt_log=$1-$_dtt_tag node _dtt_code
    shift
    for node in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
        ln -sfn -- "$_dtt_log-$node.log" "$_dtt_job/logs/latest-$node.log"
    done
    ln -sfn -- "$_dtt_log-$_dtt_host.log" "$_dtt_job/logs/latest.log"
    say "$name on $SLURM_JOB_NODELIST: see $_dtt_job/logs/latest.log"
    _dtt_code="$(declare -p _dtt_directory _dtt_job _dtt_log _dtt_tag _dtt_host _dtt_port)
        $(declare -f _dtt_set_up _dtt_unfit _dtt_processes)
        _dtt_processes \"\$@\""
    ( # a shell of its own: what set-up does, even `exit`, never reaches this script
        trap _dtt_unfit EXIT
        _dtt_set_up || exit
        exec srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \
            --cpus-per-task=32 \
            --kill-on-bad-exit=0 --wait=60 \
            bash -c "$_dtt_code" bash "$@"
    ) &
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

# field NAME [JOB]: what Slurm has on record of a job; empty if it gives no answer.
field() { scontrol show job "${2:-$id}" 2>/dev/null | sed -n "s/.*\<$1=\([^ ]*\).*/\1/p" | head -n 1; }

# What Slurm does with this job: `running`, `preempted`, `cancelled` by a person, or `ended` by Slurm
# itself; empty if it gives no answer. COMPLETING hides which of them it is, but only what Slurm does
# by itself has a reason. In the grace period of a preemption Slurm signals the ranks but not this
# script, and if they end by themselves it does not requeue the job.
fate() {
    local since
    since=$(field PreemptTime)
    if [[ $since == [0-9]* && ! $since < $(field StartTime) ]]; then echo preempted && return; fi
    case $(field JobState)/$(field Reason) in
    */ | /*) ;;
    RUNNING/* | SUSPENDED/* | STOPPED/*) echo running ;;
    CANCELLED/* | COMPLETING/None) echo cancelled ;;
    *) echo ended ;;
    esac
}

# ---- signals -----------------------------------------------------------------------------------

asked=''  # why we asked for a stop; empty when nobody or somebody else did
step=''
successor=''

ask() {
    local request=$trained/control
    if [[ -n $asked || -e $request/stop ]]; then return; fi
    asked=$1
    mkdir -p -- "$request"
    printf '%s\n' "$1" >"$request/.stop" && mv -- "$request/.stop" "$request/stop"
}

a_person_asks() {
    local line
    line=$(head -n 1 "$trained/control/stop" 2>/dev/null) && [[ $line != slurm:* ]]
}

# A request of ours that nobody was left to hear is not meant for another attempt.
drop_request() { a_person_asks || rm -f -- "$trained/control/stop"; }

on_limit() {
    [[ -z $asked ]] || return
    say "the time limit is near: asking to save and stop"
    ask "$limit"
}

on_term() {
    say "got SIGTERM"
    ask 'slurm: SIGTERM'
}

trap on_limit USR2
trap on_term TERM

# Slurm's signal comes as early as was right when the job was submitted. `lead` holds the seconds
# that stopping takes by now; more than half of the time is never given to it.
watch_limit() {
    local ends end lead longest now
    ends=$(field EndTime)
    end=$(date -d "$ends" +%s) || return # no limit
    longest=$(((end - $(date +%s)) / 2))
    while sleep 5; do
        lead=$(head -n 1 "$trained/lead") && [[ $lead =~ ^[1-9][0-9]{0,6}$ ]] || continue
        now=$(date +%s)
        if ((now < end - (lead < longest ? lead : longest))); then continue; fi
        if [[ $(field EndTime) == "$ends" ]]; then
            kill -USR2 $$
            return
        fi
        ends=$(field EndTime) # somebody has moved it
        end=$(date -d "$ends" +%s) || return
    done
}
watch_limit >/dev/null 2>&1 &
watch=$!
trap 'kill "$watch" 2>/dev/null' EXIT

# decided again|over MESSAGE…: what becomes of the job, for its log and for `dtt job status`.
decided() {
    trap '' USR2 TERM # a requeue sends them, too
    say "${*:2}"
    drop_request
    echo "$1: ${*:2}" >"$_dtt_job/.decision" && mv -- "$_dtt_job/.decision" "$_dtt_job/decision"
}

# leave CODE MESSAGE…: the end of this job.
leave() {
    decided over "${@:2}"
    exit "$1"
}

# ---- this attempt ------------------------------------------------------------------------------

mkdir -p -- "$_dtt_job/logs" "$_dtt_job/control"
# One Slurm job at a time works here. A rival must not touch anything, nor come back.
if ! ln -s -- "$id" "$_dtt_job/slurm_job" 2>/dev/null; then
    other=$(readlink -- "$_dtt_job/slurm_job")
    if [[ -n $other && $other != "$id" && $(field JobState "$other") =~ ^(RUNNING|SUSPENDED|STOPPED)$ ]]; then
        say "job $other runs in $_dtt_job: this one ends"
        exit 78
    fi
    ln -sfn -- "$id" "$_dtt_job/slurm_job"
fi
ln -sfn -- "$log" "$_dtt_job/logs/latest-slurm.log"
drop_request
rm -f -- "$_dtt_job/decision"

# `stalled` holds the newest checkpoint's step and how many attempts in a row began with it.
before=$(largest "$trained/checkpoints/step-")
stalled=0
if [[ -s $_dtt_job/stalled && (${1:-} == continued || ${SLURM_RESTART_COUNT:-0} != 0) ]]; then
    read -r last stalled <"$_dtt_job/stalled"
    [[ $last == "$before" && $stalled =~ ^[0-9]+$ ]] || stalled=0
fi
give_up="3 attempts in a row without a new checkpoint: see logs/latest.log, then $again"
if ((stalled >= 3)); then leave 1 "$give_up"; fi
printf '%s %s\n' "$before" "$((++stalled))" >"$_dtt_job/stalled"

attempt=$(largest "$_dtt_job/attempts/")
launch train dtt.main "${command[@]}"

# ---- how it ended, and whether it goes on ------------------------------------------------------

# told NAME FOLDER: a field of the exit.json that a training wrote into its newest attempt.
told() { sed -n "s/^ *\"$1\": *\"\{0,1\}\([^\",]*\).*/\1/p" "$2/attempts/$(largest "$2/attempts/")/exit.json" 2>/dev/null; }

code=none by=$asked
case $status in
1 | 2 | 65 | 66 | 74 | 75 | 76 | 78 | 130) code=$status ;;
esac
if (($(largest "$_dtt_job/attempts/") > attempt)); then # torchrun says 1, srun may say 0; this is the truth
    code=$(told code "$_dtt_job") by=$(told asked_by "$_dtt_job")
    status=${code:-$status} code=${code:-none}
fi

case $code in
0) leave 0 "done" ;;
2 | 65 | 66 | 76 | 130) leave "$status" "exit code $code: mend what it says, then $again" ;;
esac
fate=$(fate)
if [[ $fate == cancelled ]]; then leave "$status" "exit code $code; the job was cancelled"; fi
if a_person_asks; then by="a person"; fi
# A signal was a wish to stop if Slurm has nothing else in mind; no answer is no reason to end.
if [[ $code == 75 && $by != "$limit" && ($fate == running || ! $by =~ ^(SIG.*|slurm:.*|)$) ]]; then
    rm -f -- "$trained/control/stop"
    leave 75 "stopped on request, all is saved; $again goes on"
fi
if [[ $(largest "$trained/checkpoints/step-") == "$before" ]] && ((stalled >= 3)); then
    leave "$status" "exit code $code; $give_up"
fi
how="exit code $code"
if [[ $fate == preempted ]]; then how="preempted, $how"; fi
decided again "$how; back into the queue"
until scontrol requeue "$id"; do
    case $(fate) in
    '') sleep 10 ;; # Slurm is restarting
    ended) exit "$status" ;; # it lost a node: Slurm has put it back by itself
    *) leave "$status" "cannot be requeued: $again goes on" ;;
    esac
done
exit "$status"
