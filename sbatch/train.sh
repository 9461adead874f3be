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

# Written by `dtt submit`. In the same folder, `sbatch jobs/run/slurm.sh` resumes the
# job. 120 s before the time limit, or earlier, it asks dtt to save and stop; how the job then
# continues: requeue. See docs/slurm.md.
# shellcheck disable=SC1091,SC2034,SC2329  # sourced files; variables and functions used on nodes and in traps

# Variables that share a shell with the set-up lines start with `_dtt_`, to prevent name clashes.
set -u
limit='slurm: time limit'
_dtt_directory=/scratch/me/dtt
_dtt_job=jobs/run
id=$SLURM_JOB_ID
log=$SLURM_JOB_NAME-$id.log
again='sbatch jobs/run/slurm.sh'
trained=$_dtt_job # directory of the checkpoints and of requests
command=(train "$_dtt_job")
_dtt_tag=$SLURM_JOB_ID-r${SLURM_RESTART_COUNT:-0}
_dtt_host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
_dtt_port=$((10000 + (SLURM_JOB_ID + 7919 * ${SLURM_RESTART_COUNT:-0}) % 20000))
while (: <"/dev/tcp/127.0.0.1/$_dtt_port") 2>/dev/null; do ((_dtt_port++)); done # the port is in use
cd -- "$_dtt_directory" || exit 66

message() { printf '%s slurm: %s\n' "$(date +%T)" "$*"; }

# ---- on every node -----------------------------------------------------------------------------

_dtt_set_up() {
    set +u
    source env.sh || return
    return 0
}

_dtt_setup_failed() {
    echo "slurm: cannot set up $(hostname)" >&2
    exit 78
}

_dtt_processes() {
    cd -- "$_dtt_directory" || exit 66
    exec >>"$_dtt_job/logs/$_dtt_log-${SLURMD_NODENAME:-$(hostname)}.log" 2>&1
    trap _dtt_setup_failed EXIT # in case set-up fails or exits, or the program is missing
    _dtt_set_up || exit
    cd -- "$_dtt_directory" || exit
    # The batch script requests the stop. The launcher must not die of a signal before the ranks have
    # saved; the ranks install their own handlers.
    trap '' USR2 TERM
    getent hosts "$_dtt_host" >/dev/null || _dtt_host=$SLURM_LAUNCH_NODE_IPADDR
    exec torchrun \
        --nnodes="$SLURM_JOB_NUM_NODES" --nproc_per_node=4 \
        --node_rank="$SLURM_NODEID" --rdzv_endpoint="$_dtt_host:$_dtt_port" --max_restarts=0 \
        --signals_to_handle=SIGINT,SIGHUP,SIGQUIT \
        -m "$@"
}

# launch NAME MODULE [ARGUMENT]…: run it on all nodes; sets `status`. Each node has its own log.
launch() {
    local name=$1 _dtt_log=$1-$_dtt_tag node _dtt_code
    shift
    for node in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
        ln -sfn -- "$_dtt_log-$node.log" "$_dtt_job/logs/latest-$node.log"
    done
    ln -sfn -- "$_dtt_log-$_dtt_host.log" "$_dtt_job/logs/latest.log"
    message "$name on $SLURM_JOB_NODELIST: see $_dtt_job/logs/latest.log"
    _dtt_code="$(declare -p _dtt_directory _dtt_job _dtt_log _dtt_tag _dtt_host _dtt_port)
        $(declare -f _dtt_set_up _dtt_setup_failed _dtt_processes)
        _dtt_processes \"\$@\""
    ( # a subshell, so that set-up (even `exit`) does not affect this script
        trap _dtt_setup_failed EXIT
        _dtt_set_up || exit
        exec srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \
            --cpus-per-task=32 \
            --kill-on-bad-exit=0 --wait=60 \
            bash -c "$_dtt_code" bash "$@"
    ) &
    step=$!
    # A signal ends `wait` early; a second `wait` still returns the exit code of the step.
    while kill -0 "$step" 2>/dev/null; do wait "$step"; done
    wait "$step"
    status=$?
}

# ---- queries of the job directory and of Slurm -------------------------------------------------

# largest PREFIX: the largest number that follows this path prefix; -1 if there is none.
largest() {
    local path number best=-1
    for path in "$1"*; do
        number=${path#"$1"}
        if [[ $number =~ ^[0-9]+$ ]] && ((10#$number > best)); then best=$((10#$number)); fi
    done
    echo "$best"
}

saved_steps() { largest "$trained/checkpoints/step-"; }

# field NAME [JOB]: a field of Slurm's record of a job; empty if Slurm does not answer.
field() { scontrol show job "${2:-$id}" 2>/dev/null | sed -n "s/.*\<$1=\([^ ]*\).*/\1/p" | head -n 1; }

# The state of this job: `running`, `preempted`, `cancelled` by a user, or `ended` by Slurm itself;
# empty if Slurm does not answer. COMPLETING can mean any of these, but only actions of Slurm itself
# have a reason. In the grace period of a preemption, Slurm signals the ranks but not this script, and
# does not requeue the job if the ranks end by themselves.
slurm_state() {
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

stop_reason=''  # reason of this script's own stop request; empty if it made none
step=''
successor=''

request_stop() {
    local request=$trained/control
    if [[ -n $stop_reason || -e $request/stop ]]; then return; fi
    stop_reason=$1
    mkdir -p -- "$request"
    printf '%s\n' "$1" >"$request/.stop" && mv -- "$request/.stop" "$request/stop"
}

user_requested_stop() {
    local line
    line=$(head -n 1 "$trained/control/stop" 2>/dev/null) && [[ $line != slurm:* ]]
}

# A request of this script that no process has read must not stop the next attempt.
remove_request() { user_requested_stop || rm -f -- "$trained/control/stop"; }

on_limit() {
    [[ -z $stop_reason ]] || return
    message "time limit reached soon: requesting a checkpoint and stop"
    request_stop "$limit"
}

on_term() {
    message "received SIGTERM"
    request_stop 'slurm: SIGTERM'
}

trap on_limit USR2
trap on_term TERM

# Slurm's signal uses the lead time known at submission. The file `lead` holds the current number of
# seconds that stopping takes; at most half of the time limit is used for it.
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
        ends=$(field EndTime) # the time limit was changed
        end=$(date -d "$ends" +%s) || return
    done
}
watch_limit >/dev/null 2>&1 &
watch=$!
trap 'kill "$watch" 2>/dev/null' EXIT

# record_decision again|over MESSAGE…: record whether the job continues, for its log and `dtt job status`.
record_decision() {
    trap '' USR2 TERM # a requeue also sends these signals
    message "${*:2}"
    remove_request
    echo "$1: ${*:2}" >"$_dtt_job/.decision" && mv -- "$_dtt_job/.decision" "$_dtt_job/decision"
}

# write_report CODE: write the page that shows how the run ended; a run that is done has written its own.
# Nothing depends on the page, so it comes last and may fail.
write_report() {
    if [[ $1 == 0 || $(largest "$trained/attempts/") == -1 ]]; then return; fi
    (_dtt_set_up && timeout 120 python -m dtt.main report "$trained") >>"$_dtt_job/logs/report.log" 2>&1
}

# end_job CODE MESSAGE…: end this job, so that it does not continue.
end_job() {
    record_decision over "${@:2}"
    write_report "$1"
    exit "$1"
}

# ---- this attempt ------------------------------------------------------------------------------

mkdir -p -- "$_dtt_job/logs" "$_dtt_job/control"
# Only one Slurm job at a time may use the directory. Another one must change nothing and end.
if ! ln -s -- "$id" "$_dtt_job/slurm_job" 2>/dev/null; then
    other=$(readlink -- "$_dtt_job/slurm_job")
    if [[ -n $other && $other != "$id" && $(field JobState "$other") =~ ^(RUNNING|SUSPENDED|STOPPED)$ ]]; then
        message "$_dtt_job is used by job $other: this job ends"
        exit 78
    fi
    ln -sfn -- "$id" "$_dtt_job/slurm_job"
fi
ln -sfn -- "$log" "$_dtt_job/logs/latest-slurm.log"
remove_request
rm -f -- "$_dtt_job/decision"

# `stalled` holds the step of the newest checkpoint and the number of attempts since it was saved.
before=$(saved_steps)
stalled=0
if [[ -s $_dtt_job/stalled && (${1:-} == continued || ${SLURM_RESTART_COUNT:-0} != 0) ]]; then
    read -r last stalled <"$_dtt_job/stalled"
    [[ $last == "$before" && $stalled =~ ^[0-9]+$ ]] || stalled=0
fi
give_up="3 consecutive attempts without a new checkpoint: see logs/latest.log, then run $again"
if ((stalled >= 3)); then end_job 1 "$give_up"; fi
printf '%s %s\n' "$before" "$((++stalled))" >"$_dtt_job/stalled"

attempt=$(largest "$_dtt_job/attempts/")
launch train dtt.main "${command[@]}"

# ---- exit code, and whether the job continues --------------------------------------------------

# exit_field NAME FOLDER: a field of the exit.json of the newest attempt of a training job.
exit_field() { sed -n "s/^ *\"$1\": *\"\{0,1\}\([^\",]*\).*/\1/p" "$2/attempts/$(largest "$2/attempts/")/exit.json" 2>/dev/null; }

code=none by=$stop_reason
case $status in
1 | 2 | 65 | 66 | 74 | 75 | 76 | 78 | 130) code=$status ;;
esac
if (($(largest "$_dtt_job/attempts/") > attempt)); then # torchrun exits with 1, srun maybe with 0; exit.json has the code
    code=$(exit_field code "$_dtt_job") by=$(exit_field asked_by "$_dtt_job")
    status=${code:-$status} code=${code:-none}
fi

case $code in
0) end_job 0 "done" ;;
2 | 65 | 66 | 76 | 130) end_job "$status" "exit code $code: fix the reported error, then run $again" ;;
esac
job_state=$(slurm_state)
if [[ $job_state == cancelled ]]; then end_job "$status" "exit code $code; the job was cancelled"; fi
if user_requested_stop; then by="a user"; fi
# A signal is a stop request of a user if Slurm runs the job as before. If Slurm does not answer, the
# job continues.
if [[ $code == 75 && $by != "$limit" && ($job_state == running || ! $by =~ ^(SIG.*|slurm:.*|)$) ]]; then
    rm -f -- "$trained/control/stop"
    end_job 75 "stopped on request with a checkpoint; resume with $again"
fi
if [[ $(saved_steps) == "$before" ]] && ((stalled >= 3)); then
    end_job "$status" "exit code $code; $give_up"
fi
how="exit code $code"
if [[ $job_state == preempted ]]; then how="preempted, $how"; fi
record_decision again "$how; requeued"
until scontrol requeue "$id"; do
    case $(slurm_state) in
    '') sleep 10 ;; # Slurm is restarting
    ended) exit "$status" ;; # a node failed: Slurm has requeued the job by itself
    *) end_job "$status" "cannot be requeued; resume with $again" ;;
    esac
done
exit "$status"
