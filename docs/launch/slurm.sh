#!/bin/bash
# One process on each node, which has all of the node's devices:
#   sbatch --nodes 4 docs/launch/slurm.sh my.txt --preset gpt2-124m --mesh fsdp=32
# The run folder must be on a file system that all nodes see. Two minutes before the time is up Slurm
# sends SIGTERM; the run saves, ends with status 143, and is queued again. It then goes on, and so it
# does where one process died, of which JAX's runtime tells the others by ending them (134).
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
