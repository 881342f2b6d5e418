#!/usr/bin/env python3
"""Cycles of a kernel's loop over tiles on a Hopper multiprocessor, without a card.

    python benchmarks/cycles.py scan_backward scan_backward_2 --trips 2,3 --blocks 2 --phases

Compiles crates/engine/src/cuda/kernels/FILE.cu with the NVRTC that `.ci/run` puts into target/nvrtc
(LD_LIBRARY_PATH names its folder), takes the machine code apart with cuobjdump (of a CUDA toolkit, or
of the package triton), and issues one tile's instructions for every warp of so many blocks: by the
stalls and scoreboards that the code itself carries, and the pipes of a multiprocessor. Everything read
from memory is taken to have arrived. A tile is what lies between the wait for asynchronous copies and
the branch back to it. The branches back inside it are taken as often as --trips says, in their order;
forward ones are not taken, but where what they skip copies elements one by one.

Measured on an H200 with Nsight Compute (benchmarks/2026-11-19-h200.md) and by this model, cycles a tile:
5,680 and 5,080; 5,390 and 5,320; 26,060 and 24,690.
"""

import argparse
import ctypes
import os
import pathlib
import re
import shutil
import subprocess
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
KERNELS = ROOT / "crates/engine/src/cuda/kernels"
SCHEDULERS = 4
# Of a scheduler: cycles between two instructions of a pipe.
INTERVAL = dict(alu=2, integer=2, special=8, memory=2)
ALU_LATENCY, SPECIAL_LATENCY, BARRIER, BRANCH = 5, 22, 12, 8
# Until a load of one, two or four words is there, and of what else uses shared memory's pipe.
LOAD_LATENCY = {1: 23, 2: 25, 4: 30}
MEMORY_LATENCY = dict(SHFL=24, STS=12, LDGSTS=12)
GLOBAL_LATENCY = 40
# How far pipes may be behind before a scheduler waits.
SPECIAL_QUEUE, MEMORY_QUEUE = 8, 24


def source(name, seen):
    def included(match):
        if match[1] in seen:
            return ""
        seen.add(match[1])
        return source(match[1], seen)

    return re.sub(r'#include "(\w+\.cuh)"', included, (KERNELS / name).read_text())


def compiled(file, real):
    """Machine code for sm_90a."""
    nvrtc = ctypes.CDLL(str(next((ROOT / "target/nvrtc").glob("nvidia/*/lib/libnvrtc.so.*"))))
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), source(f"{file}.cu", set()).encode(), file.encode(), 0, None, None)
    options = [b"--gpu-architecture=sm_90a", f"-D{real}".encode(), b"--std=c++17"]
    failed = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    what = "ProgramLog" if failed else "CUBIN"
    getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    answer = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{what}")(program, answer)
    if failed:
        raise SystemExit(answer.value.decode())
    return answer.raw


class Instruction:
    def __init__(self, text, control):
        self.text = re.sub(r"^@!?U?P\w+\s+", "", text)
        self.conditional = text != self.text
        self.op = self.text.split()[0]
        name = self.op.split(".")[0]
        self.stall = max(control & 15, 1)
        self.sets = control >> 5 & 7
        self.frees = control >> 8 & 7
        self.waits = [i for i in range(6) if control >> 11 + i & 1]
        self.words = 4 if "128" in self.op else 2 if "64" in self.op or name == "LDGSTS" else 1
        self.latency = ALU_LATENCY
        if name in ("LDS", "STS", "SHFL", "LDGSTS", "LDG", "STG", "LDL", "STL"):
            self.pipe = "memory"
            self.latency = LOAD_LATENCY[self.words] if name == "LDS" else MEMORY_LATENCY.get(name, GLOBAL_LATENCY)
        elif name == "MUFU":
            self.pipe, self.latency = "special", SPECIAL_LATENCY
        elif name in ("FFMA", "FMUL", "FADD"):
            self.pipe = "float"
        elif name == "IMAD":
            self.pipe = "integer"
        elif name in ("S2R", "S2UR", "LDC", "ULDC"):
            self.pipe, self.latency = "none", 20
        else:
            self.pipe = "barrier" if name == "BAR" else "alu"
        target = re.search(r"0x([0-9a-f]+)", self.text) if self.op.startswith("BRA") else None
        self.target = int(target[1], 16) // 16 if target else None


def disassembled(cubin, function, cuobjdump):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        lines = subprocess.run([cuobjdump, "-sass", "-fun", function, file.name],
                               check=True, capture_output=True, text=True).stdout.splitlines()
    code = []
    for line, below in zip(lines, lines[1:]):
        match = re.match(r"\s+/\*[0-9a-f]{4,5}\*/\s+(.*?);\s+/\* 0x[0-9a-f]+ \*/", line)
        if match:
            # The upper half of an instruction holds what the scheduler is told, from bit 41 on.
            upper = int(re.search(r"/\* 0x([0-9a-f]+) \*/", below)[1], 16)
            code.append(Instruction(match[1].strip(), upper >> 41))
    if not code:
        raise SystemExit(f"no kernel {function}")
    return code


def tile(code, trips):
    """Indices of the instructions that a tile runs."""
    start = next(i for i, x in enumerate(code) if x.op == "LDGDEPBAR")
    trips, left, order, at = list(trips), {}, [], start
    while True:
        order.append(at)
        instruction = code[at]
        if instruction.op == "EXIT":
            return order
        to, at = instruction.target, at + 1
        if to is None:
            continue
        if to <= order[-1] and to <= start:
            return order
        if not instruction.conditional:
            at = to
        elif to <= order[-1]:
            if order[-1] not in left:
                if not trips:
                    raise SystemExit(f"--trips: a loop more, {instruction.text}")
                left[order[-1]] = trips.pop(0)
            if left[order[-1]] > 0:
                left[order[-1]] -= 1
                at = to
        else:
            skipped = {x.op for x in code[at:to]}
            by_fours = any(op.startswith(("LDGSTS", "STG.E.64", "STG.E.128")) for op in skipped)
            if skipped & {"LDG.E.U16", "STG.E.U16"} and not by_fours:
                at = to


class Warp:
    def __init__(self, block):
        self.block, self.next, self.ready, self.waits = block, 0, 37 * block, False
        self.boards, self.times = [0] * 6, []


def run(code, order, blocks, warps):
    """When each warp issues each instruction of `order`; the cycles of all."""
    all_warps = [[Warp(block) for block in range(blocks) for w in range(warps) if w % SCHEDULERS == s]
                 for s in range(SCHEDULERS)]
    free = [dict(alu=0, special=0, memory=0, heavy=0, light=0) for _ in range(SCHEDULERS)]
    turn, memory, arrived, cycle, running = [0] * SCHEDULERS, 0, {}, 0, blocks * warps

    def can(pipes, warp):
        if warp.next == len(order) or warp.waits or warp.ready > cycle:
            return False
        x = code[order[warp.next]]
        if any(warp.boards[board] > cycle for board in x.waits):
            return False
        return {
            "special": pipes["special"] <= cycle + SPECIAL_QUEUE,
            "alu": pipes["alu"] <= cycle,
            "integer": pipes["heavy"] <= cycle,
            "float": min(pipes["heavy"], pipes["light"]) <= cycle,
            "memory": pipes["memory"] <= cycle and memory <= cycle + MEMORY_QUEUE,
        }.get(x.pipe, True)

    while running:
        for s in range(SCHEDULERS):
            mine, pipes = all_warps[s], free[s]
            ranked = mine[turn[s]:] + mine[:turn[s]]
            warp = next((warp for warp in ranked if can(pipes, warp)), None)
            if warp is None:
                continue
            turn[s] = mine.index(warp)
            x = code[order[warp.next]]
            done, read = cycle + x.latency, cycle + 10
            if x.pipe == "special":
                begin = max(pipes["special"], cycle)
                pipes["special"] = begin + INTERVAL["special"]
                done, read = begin + x.latency, begin + 6
            elif x.pipe == "alu":
                pipes["alu"] = cycle + INTERVAL["alu"]
            elif x.pipe in ("integer", "float"):
                half = "heavy" if x.pipe == "integer" or pipes["heavy"] <= pipes["light"] else "light"
                pipes[half] = cycle + INTERVAL["integer"]
            elif x.pipe == "memory":
                pipes["memory"] = cycle + INTERVAL["memory"]
                begin = max(memory, cycle)
                memory = begin + x.words
                done, read = memory - 1 + x.latency, memory + 6
            for board, time in ((x.sets, done), (x.frees, read)):
                if board < 6:
                    warp.boards[board] = max(warp.boards[board], time)
            warp.ready = cycle + (max(x.stall, BRANCH) if x.target is not None else x.stall)
            warp.times.append(cycle)
            warp.next += 1
            running -= warp.next == len(order)
            if x.pipe == "barrier":
                warp.waits = True
                there = arrived.setdefault(warp.block, [])
                there.append(warp)
                if len(there) == warps:
                    for other in there:
                        other.waits, other.ready = False, max(other.ready, cycle + BARRIER)
                    there.clear()
        cycle += 1
    return cycle, [warp for mine in all_warps for warp in mine]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("function")
    parser.add_argument("--trips", default="", help="how often each branch back is taken: 2,3")
    parser.add_argument("--blocks", type=int, default=2, help="of a multiprocessor [%(default)s]")
    parser.add_argument("--warps", type=int, default=4, help="of a block [%(default)s]")
    parser.add_argument("--real", default="REAL_BF16")
    parser.add_argument("--phases", action="store_true", help="cycles between barriers and loops too")
    parser.add_argument("--cuobjdump", default=shutil.which("cuobjdump") or os.environ.get("CUOBJDUMP"))
    arguments = parser.parse_args()
    if not arguments.cuobjdump:
        raise SystemExit("no cuobjdump: --cuobjdump, CUOBJDUMP or PATH names it")
    code = disassembled(compiled(arguments.file, arguments.real), arguments.function, arguments.cuobjdump)
    order = tile(code, [int(trip) for trip in arguments.trips.split(",") if trip])
    (short, _), (long, warps) = (
        run(code, order * tiles, arguments.blocks, arguments.warps) for tiles in (2, 4))
    cycles = (long - short) / 2
    issued = len(order) * arguments.blocks * arguments.warps / SCHEDULERS
    print(f"{len(order)} instructions a tile, {cycles:.0f} cycles, {issued / cycles:.2f} of the issue slots")
    if not arguments.phases:
        return
    marks = {0, len(order) - 1}
    for place, at in enumerate(order[1:], 1):
        if code[order[place - 1]].pipe == "barrier" or at < order[place - 1]:
            marks.add(place)
    marks = sorted(marks)
    for first, last in zip(marks, marks[1:]):
        spent = [warp.times[2 * len(order) + last] - warp.times[2 * len(order) + first] for warp in warps]
        print(f"  {order[first]} to {order[last]}: {last - first} instructions, {sum(spent) / len(spent):.0f} cycles")


if __name__ == "__main__":
    main()
