//! Programs that answer or draw: they train nothing, and have settings of their own.

use crate::failure::Fix;
use crate::frame::{Phase, Server};

pub fn fixes(server: Server, phase: Option<Phase>) -> Vec<Fix> {
    let loads = phase == Some(Phase::Loading);
    match server {
        Server::Vllm if loads => vec![
            Fix::new(
                "weights over several cards",
                "vllm serve MODEL --tensor-parallel-size 2",
            ),
            Fix::new("a quantised edition of the model", ""),
        ],
        Server::Vllm => vec![
            Fix::new(
                "a smaller share of the card for weights and cache, which leaves more for a step",
                "vllm serve MODEL --gpu-memory-utilization 0.8",
            ),
            Fix::new(
                "fewer sequences at once",
                "vllm serve MODEL --max-num-seqs 64",
            ),
            Fix::new("shorter contexts", "vllm serve MODEL --max-model-len 8192"),
        ],
        Server::Sglang if loads => vec![Fix::new(
            "weights over several cards",
            "python -m sglang.launch_server … --tp-size 2",
        )],
        Server::Sglang => vec![
            Fix::new(
                "a smaller share of the card for weights and cache, which leaves more for a step",
                "python -m sglang.launch_server … --mem-fraction-static 0.7",
            ),
            Fix::new(
                "shorter pieces of a prompt at once",
                "python -m sglang.launch_server … --chunked-prefill-size 2048",
            ),
        ],
        Server::Comfy => vec![
            Fix::new(
                "where it fails at VAE Decode: decode in tiles",
                "the node VAE Decode (Tiled) in place of VAE Decode",
            ),
            Fix::new(
                "keep less of the model on the card",
                "python main.py --lowvram",
            ),
            Fix::new("a smaller image, or fewer frames or images at once", ""),
        ],
        Server::Diffusers => vec![
            Fix::new(
                "only the part that is at work on the card",
                "pipe.enable_model_cpu_offload()",
            ),
            Fix::new("decode in tiles", "pipe.vae.enable_tiling()"),
            Fix::new("a smaller image, or fewer frames or images at once", ""),
        ],
    }
}
