#!/bin/sh
# Trains the same few steps on two CPU ranks started by torchrun, mpirun and Slurm's srun, as far as
# they are there, and compares the losses with those of one rank.
#
#     cargo build --release
#     pip install torch; apt-get install openmpi-bin slurmd slurmctld munge
#     TORCHRUN=venv/bin/torchrun benchmarks/launchers.sh target/release/cinch
#
# Slurm runs as a cluster of this one machine, in a folder of its own; it needs root.
set -eu
cinch=$(realpath "${1:-target/release/cinch}")
torchrun=${TORCHRUN:-torchrun}
home=$(mktemp -d)
export CINCH_CACHE="$home/cache" CUDA_VISIBLE_DEVICES=
started=
trap 'exit 1' HUP INT TERM
trap 'for pid in $started; do kill "$pid" 2>/dev/null || true; done; rm -rf "$home"' EXIT
cd "$home"

model="--set model.d_model=32 --set model.n_layers=2 --set model.vocab_size=257 --set model.max_seq_len=64
    --tokenizer bytes --seq-len 32 --lr 1e-3 --threads 1 --log-steps 1 --eval-steps 0 -q --device cpu"

losses() {
    python3 -c 'import json, sys
print(*(json.loads(line)["loss"] for line in open(sys.argv[1])))' "$1/metrics.jsonl"
}

compare() {
    python3 -c 'import sys
one, other = (list(map(float, text.split())) for text in sys.argv[2:])
apart = max(abs(a - b) / abs(a) for a, b in zip(one, other))
assert len(one) == len(other) and apart < 1e-4, (sys.argv[1], len(one), len(other), apart)
print(f"{sys.argv[1]}: {len(one)} losses, off by {apart:.1e} at most")' "$1" "$(losses alone)" "$(losses "$2")"
}

# shellcheck disable=SC2086
"$cinch" train $model --batch-size 2 --grad-accum 4 --max-steps 20 --output-dir alone
two="train $model --batch-size 2 --grad-accum 2"

if command -v "$torchrun" >/dev/null; then
    # shellcheck disable=SC2086
    "$torchrun" --standalone --nproc-per-node 2 --no-python "$cinch" $two --max-steps 20 --output-dir torchrun
    compare "torchrun --standalone" torchrun
    # shellcheck disable=SC2086
    "$torchrun" --nnodes 1 --nproc-per-node 2 --master-addr 127.0.0.1 --master-port 29612 --no-python \
        "$cinch" $two --max-steps 20 --shard zero2 --output-dir torchrun-static
    compare "torchrun --master-port" torchrun-static
else
    echo "torchrun is not here (TORCHRUN=…)"
fi

if command -v mpirun >/dev/null; then
    # shellcheck disable=SC2086
    mpirun --allow-run-as-root --oversubscribe -np 2 "$cinch" $two --max-steps 20 --shard zero1 --output-dir mpirun
    compare mpirun mpirun
else
    echo "mpirun is not here"
fi

if command -v slurmctld >/dev/null && command -v slurmd >/dev/null && [ "$(id -u)" = 0 ]; then
    host=$(hostname -s)
    mkdir -p slurm/state slurm/spool
    if ! munge -n >/dev/null 2>&1; then
        [ -f /etc/munge/munge.key ] || { echo "munge has no key: run create-munge-key"; exit 1; }
        mkdir -p /run/munge && chown munge: /run/munge
        runuser -u munge -- munged --foreground >slurm/munged.log 2>&1 &
        started="$started $!"
        until munge -n >/dev/null 2>&1; do sleep 0.1; done
    fi
    cat >slurm/slurm.conf <<CONF
ClusterName=one
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
MpiDefault=none
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmctldPort=27817
SlurmdPort=27818
SlurmctldPidFile=$home/slurm/slurmctld.pid
SlurmdPidFile=$home/slurm/slurmd.pid
StateSaveLocation=$home/slurm/state
SlurmdSpoolDir=$home/slurm/spool
SlurmctldLogFile=$home/slurm/slurmctld.log
SlurmdLogFile=$home/slurm/slurmd.log
ReturnToService=2
NodeName=$host NodeAddr=127.0.0.1 CPUs=$(nproc) State=UNKNOWN
PartitionName=all Nodes=$host Default=YES MaxTime=INFINITE State=UP
CONF
    export SLURM_CONF="$home/slurm/slurm.conf"
    slurmctld -D -f "$SLURM_CONF" >slurm/slurmctld.out 2>&1 &
    started="$started $!"
    slurmd -D -f "$SLURM_CONF" >slurm/slurmd.out 2>&1 &
    started="$started $!"
    tries=0
    until sinfo -h -o %T 2>/dev/null | grep -q idle; do
        tries=$((tries + 1))
        [ "$tries" -lt 300 ] || { cat slurm/*.log slurm/*.out; exit 1; }
        sleep 0.1
    done
    # shellcheck disable=SC2086
    srun --ntasks 2 --overcommit "$cinch" $two --max-steps 20 --shard zero3 --output-dir srun
    compare srun srun
    # Before a job's time is over Slurm sends SIGUSR1: the run is saved, and the job queued again.
    # shellcheck disable=SC2086
    srun --ntasks 2 --overcommit "$cinch" $two --max-steps 1000000 --save-steps 5 --output-dir requeue >srun.out 2>&1 &
    step=$!
    until ls requeue/checkpoints/step-* >/dev/null 2>&1; do
        kill -0 "$step" || { cat srun.out; exit 1; }
        sleep 0.1
    done
    scancel --signal USR1 "$(squeue -h -o %i | head -1)"
    code=0
    wait "$step" || code=$?
    [ "$code" = 130 ] || { cat srun.out; echo "srun ended with $code"; exit 1; }
    last=$(find requeue/checkpoints -name 'step-*' | sed 's/.*step-0*//' | sort -n | tail -1)
    "$cinch" train --resume requeue --max-steps $((last + 2)) -q
    echo "srun: saved at SIGUSR1, and gone on with on one rank"
else
    echo "Slurm is not here"
fi
