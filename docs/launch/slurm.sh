#!/bin/bash
# A training run with one process per node, which uses all devices of the node:
#   sbatch --nodes 4 docs/launch/slurm.sh my.txt --preset gpt2-124m --mesh fsdp=32
# The run folder must be on a file system that all nodes share. Slurm sends SIGTERM two minutes
# before the time limit. The run then saves, ends with status 143, is queued again and continues. If
# one process dies, JAX's runtime ends the others with status 134, and the run continues as well.
#SBATCH --job-name=jaxformer
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
set -u
run=${RUN:-runs/$SLURM_JOB_NAME-$SLURM_JOB_ID}
words=("$@")
if [ -e "$run/config.json" ]; then
    words=(--resume)
fi
srun --kill-on-bad-exit=1 jaxformer train "${words[@]}" --out "$run" --coordinator auto
status=$?
if [ "$status" -eq 143 ] || [ "$status" -eq 134 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
