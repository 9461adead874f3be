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

# Written by `dtt submit`. In the same folder, `sbatch jobs/run-tokenize/slurm.sh` resumes the
# job. 120 s before the time limit, or earlier, it asks dtt to save and stop; how the job then
# continues: requeue. See docs/slurm.md.
# shellcheck disable=SC1091,SC2034,SC2329  # sourced files; variables and functions used on nodes and in traps

# Variables that share a shell with the set-up lines start with `_dtt_`, to prevent name clashes.
set -u
limit='slurm: time limit'
_dtt_directory=/scratch/me/dtt
_dtt_job=jobs/run-tokenize
id=$SLURM_JOB_ID
log=$SLURM_JOB_NAME-$id.log
again='sbatch jobs/run-tokenize/slurm.sh'
trained=$_dtt_job # directory of the checkpoints and of requests
command=(tokenize -c jobs/run-tokenize/config.yaml)
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
    exec python -m "$@"
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
        exec srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node=32 \
            --cpus-per-task=1 \
            --mpi=pmix \
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
    scancel --signal=TERM "$id" # to the processes; srun would answer a signal with SIGKILL
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

# record_decision again|over MESSAGE…: record whether the job continues, for its log and `dtt job status`.
record_decision() {
    trap '' USR2 TERM # a requeue also sends these signals
    message "${*:2}"
    remove_request
    echo "$1: ${*:2}" >"$_dtt_job/.decision" && mv -- "$_dtt_job/.decision" "$_dtt_job/decision"
}

# end_job CODE MESSAGE…: end this job, so that it does not continue.
end_job() {
    record_decision over "${@:2}"
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
give_up="3 consecutive attempts did not finish: see logs/latest.log, then run $again"
if ((stalled >= 3)); then end_job 1 "$give_up"; fi
printf '%s %s\n' "$before" "$((++stalled))" >"$_dtt_job/stalled"

attempt=$(largest "$_dtt_job/attempts/")
((attempt = attempt > 0 ? attempt + 1 : 1))
mkdir -p -- "$_dtt_job/attempts/$attempt"
launch tokenize dtt.main "${command[@]}"

# ---- exit code, and whether the job continues --------------------------------------------------

# exit_field NAME FOLDER: a field of the exit.json of the newest attempt of a training job.
exit_field() { sed -n "s/^ *\"$1\": *\"\{0,1\}\([^\",]*\).*/\1/p" "$2/attempts/$(largest "$2/attempts/")/exit.json" 2>/dev/null; }

code=none by=$stop_reason
case $status in
0 | 1 | 2 | 65 | 66 | 74 | 75 | 76 | 78 | 130) code=$status ;;
esac
[[ $code != none || -z $stop_reason ]] || code=75 status=75 # stopped by the signal; finished work is kept
case $code in
0) reason="done" ;;
75) reason="stopped by ${stop_reason:-a request}" ;;
*) reason="exit code $status: see logs/latest.log" ;;
esac
exit_record=$_dtt_job/attempts/$attempt/exit.json # the same fields as `dtt train` writes
printf '{\n "code": %s,\n "reason": "%s",\n "step": null,\n "rank": 0,\n "node": "%s",\n "checkpoint": null,\n "asked_by": "%s"\n}\n' \
    "${code/none/1}" "$reason" "$_dtt_host" "$stop_reason" >"$exit_record.new"
mv -- "$exit_record.new" "$exit_record"

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
