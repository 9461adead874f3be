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

# Written by `dtt submit`. In the same folder, `sbatch jobs/run-tokenize/slurm.sh` resumes the job.
# The supervisor passes on stop requests and decides whether the job continues: see docs/slurm.md.
# shellcheck disable=SC1091,SC2154,SC2329  # the supervisor sets _dtt_… and calls the functions

cd -- /scratch/me/dtt || exit 66

# On the first node, before and outside of all that runs on the nodes.
_dtt_prepare() {
    _dtt_set_up
}

# Run a command on all nodes.
_dtt_launch() {
    exec srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node=32 \
        --cpus-per-task=1 \
        --mpi=pmix "$@"
}

# On every node, in the container if there is one.
_dtt_set_up() {
    eval '[ ! -f env.sh ] || source env.sh' || return
    return 0
}

# After set-up: run a module of dtt with its arguments.
_dtt_program() {
    exec python -m "$@"
}

exec python3 -IB src/dtt/jobs/slurm/supervisor --job=jobs/run-tokenize --continuation=requeue \
    --progress='data/tokens/docs-bpe4096/.units/*.json' \
    --fixed-lead \
    --functions "$(declare -f _dtt_prepare _dtt_launch _dtt_set_up _dtt_program)" "$@" \
    -- tokenize -c jobs/run-tokenize/config.yaml
