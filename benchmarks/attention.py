"""PyTorch's attention kernels in bf16, causal, forward and backward, between CUDA events.

    python3 benchmarks/attention.py [batch,heads,key_heads,tokens,width ...]

The same shapes on cinch: cargo run --release -p cinch-engine --example attention
"""

import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

SHAPES = ["32,12,12,1024,64", "1,28,4,1536,128", "1,28,4,8192,128"]
BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
WARM_UPS, RUNS = 3, 21


def median_ms(run):
    for _ in range(WARM_UPS):
        run()
    torch.cuda.synchronize()
    times = []
    for _ in range(RUNS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[RUNS // 2]


def measure(batch, heads, key_heads, tokens, width, backend):
    def tensor(count):
        x = torch.randn(batch, tokens, count, width, device="cuda", dtype=torch.bfloat16)
        return x.transpose(1, 2)

    q, k, v = (tensor(count).requires_grad_() for count in (heads, key_heads, key_heads))
    gradient = tensor(heads)

    def forward():
        return scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=heads != key_heads
        )

    with sdpa_kernel(backend):
        with torch.no_grad():
            forward_ms = median_ms(forward)
        out = forward()
        backward_ms = median_ms(
            lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True)
        )
    return forward_ms, backward_ms


def main():
    for text in sys.argv[1:] or SHAPES:
        batch, heads, key_heads, tokens, width = map(int, text.split(","))
        pairs = batch * heads * tokens * (tokens + 1) / 2
        for backend in BACKENDS:
            forward, backward = measure(batch, heads, key_heads, tokens, width, backend)
            for name, ms, products in [("forward", forward, 2), ("backward", backward, 5)]:
                rate = products * 2 * pairs * width / ms / 1e9
                print(f"{text:24} {backend.name:16} {name:10} {ms:8.3f} ms {rate:6.0f} TFLOP/s")


if __name__ == "__main__":
    main()
