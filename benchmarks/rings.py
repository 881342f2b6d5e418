#!/usr/bin/env python3
"""The network seconds that `cinch plan --scaling` predicts, beside rings simulated message by message.

    benchmarks/rings.py --cinch target/release/cinch

The prediction is a formula (`Fabric::ring_seconds`): a lap through a machine takes as long as its
narrowest link is busy, or as long as a message is on its way. Here every message of a ring is an event of its own: a rank sends the part of a round when
it has received that of the round before and its link is free; the message arrives after its bytes
and the latency of that link, which inside a machine is another one than between machines. As many
rings run side by side as a machine has GPUs, each out through an adapter of its own and each with
its share of the links inside. Needs no GPU and nothing but Python.
"""

import argparse
import json
import subprocess
import sys

from world import SCALED

# What starting a collective costs on each rank (crates/step/src/network.rs).
START = 10e-6


def cinch(binary, command):
    run = subprocess.run(f"{binary} {command} --json", shell=True, capture_output=True, text=True)
    if not run.stdout:
        sys.exit(f"{command}: {run.stderr}")
    return json.loads(run.stdout)


def fabrics(answer, found):
    """Cards by name, wherever the answer has them."""
    if isinstance(answer, dict):
        if "link_latency" in answer:
            found[answer["name"]] = answer
        answer = list(answer.values())
    if isinstance(answer, list):
        for part in answer:
            fabrics(part, found)
    return found


def ring(ranks, nodes, rounds, sent, card):
    """Seconds until the last message of a collective in which each rank sends `sent` bytes."""
    per_node = max(ranks // nodes, 1)
    # With one machine, or one GPU in each, there is one ring.
    rings = per_node if nodes > 1 else 1
    message = sent / rounds / rings
    links = []
    for rank in range(ranks):
        leaves = nodes > 1 and rank % per_node == per_node - 1
        if leaves:
            links.append((message / card["network_bandwidth"], card["network_latency"]))
        else:
            links.append((message * rings / card["link_bandwidth"], card["link_latency"]))
    received = [0.0] * ranks
    free = [0.0] * ranks
    for _ in range(rounds):
        arrived = [0.0] * ranks
        for rank, (seconds, latency) in enumerate(links):
            free[rank] = max(received[rank], free[rank]) + seconds
            arrived[(rank + 1) % ranks] = free[rank] + latency
        received = arrived
    return max(received)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cinch", default="target/release/cinch")
    binary = parser.parse_args().cinch
    cards = fabrics(cinch(binary, "gpus"), {})
    print("| model | shard | GPUs | collectives | predicted ms | simulated ms | predicted / simulated |\n|---|---|---|---|---|---|---|")
    worst = 1.0
    for title, command, shards in SCALED:
        for shard in shards:
            answer = cinch(binary, f"plan {command} --shard {shard} --scaling 1024")
            card = cards[answer["card"]]
            for row in answer["scaling"]:
                ranks, nodes, speed = row["ranks"], row["nodes"], row["speed"]
                if ranks == 1:
                    continue
                # Gradients of replicas go around twice; of the others a sum and a gather.
                rounds = (2 if shard == "none" else 1) * (ranks - 1)
                each = START + ring(ranks, nodes, rounds, 0.0, card)
                count = max(round(speed["latency_seconds"] / each), 1)
                simulated = count * (START + ring(ranks, nodes, rounds, speed["sent_bytes"] / count, card))
                ratio = speed["network_seconds"] / simulated
                worst = max(worst, ratio, 1 / ratio)
                print(f"| {title} | {shard} | {ranks} | {count} | {1e3 * speed['network_seconds']:.2f} | {1e3 * simulated:.2f} | {ratio:.3f} |")
    print(f"\nFarthest apart: {100 * (worst - 1):.1f} %.")


if __name__ == "__main__":
    main()
