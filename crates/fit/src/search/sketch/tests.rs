//! Sketches against whole plans.

use cinch_architecture::trained_sizes;
use cinch_config::Config;
use cinch_step::StepPlan;

use super::super::tests::config;
use super::*;

fn compare(config: &Config, card: &Card, length: Length) {
    let machine = StepTarget::from(card.target);
    let processor = Processor {
        machine,
        card,
        tf32: false,
    };
    let counts: Vec<usize> = (0..=config.model.num_blocks()).collect();
    let steps = Steps::new(config, card.target, length, &counts).unwrap();
    let sketch = Sketch::new(config, &steps, processor);
    let blocks = config.model.num_blocks();
    assert_eq!(sketch.bytes.len(), blocks + 1);
    for count in 0..=blocks {
        let step = StepPlan::new(config, machine, count).unwrap();
        let peak = step.peak_bytes();
        let sketched = sketch.bytes[count] - step.overhead_bytes();
        assert_eq!(
            sketched,
            peak,
            "{:?} {:?} {} of {blocks} blocks recomputed; peak at {}",
            config.model.size_name(),
            card.target,
            count,
            step.training.nodes[step.plan.peak_node].name
        );
        let seconds = step.predict(card, false).seconds;
        let error = (sketch.seconds[count] / seconds - 1.0).abs();
        // What ranks send is rounded to whole bytes. Behind which block a bucket of gradients hides
        // on a GPU depends on the length of the chain.
        let hides = card.target == Target::Cuda && !config.batch.world.is_alone();
        assert!(
            error < if hides { 0.01 } else { 1e-8 },
            "{count} blocks: {} {seconds}",
            sketch.seconds[count]
        );
        assert_eq!(sketch.host_bytes, step.plan.host_bytes);
    }
}

fn h200() -> Card {
    Card::known("H200").unwrap()
}

#[test]
fn a_short_chain_says_all_about_every_size() {
    for (family, size) in trained_sizes() {
        // Of others the sketch is the whole graph.
        if !(size.shape)().is_chain() {
            continue;
        }
        let mut own = vec![
            ("model.type", family.name),
            ("model.size", size.name),
            ("vram.batch_size", "4"),
            ("vram.gradient_accumulation_steps", "4"),
        ];
        compare(
            &config(&own),
            &Card::cpu(8, 4e11, 1e10, 4e10),
            Length::Short,
        );
        own.push(("vram.precision", "fp16"));
        own.push(("vram.use_cpu_offload", "true"));
        compare(&config(&own), &h200(), Length::Short);
    }
}

/// Frozen weights are fetched while the block before computes, wherever the block stands.
#[test]
fn a_short_chain_says_all_about_fetched_weights() {
    for quantization in ["none", "4bit"] {
        for card in [h200(), Card::known("RTX 4090").unwrap()] {
            let own = [
                ("model.type", "qwen2.5-0.5b"),
                ("lora.rank", "16"),
                ("lora.quantization", quantization),
                ("vram.batch_size", "1"),
                ("vram.gradient_accumulation_steps", "2"),
                ("vram.max_seq_len", "512"),
                ("vram.precision", "bf16"),
                ("vram.offload_frozen", "true"),
            ];
            compare(&config(&own), &card, Length::Short);
        }
    }
}

/// What ranks exchange is bucketed by blocks, and weights are gathered while the block before
/// computes.
#[test]
fn a_short_chain_says_all_about_ranks() {
    for shard in ["none", "zero1", "zero2", "zero3"] {
        for (model, link) in [("mamba", "nvlink4"), ("gpt2", "pcie3")] {
            let own = [
                ("model.type", model),
                ("vram.batch_size", "2"),
                ("vram.gradient_accumulation_steps", "2"),
                ("vram.precision", "bf16"),
                ("world.ranks", "16"),
                ("world.nodes", "2"),
                ("world.shard", shard),
            ];
            let mut card = h200();
            card.fabric = card.fabric.with(Some(link), None).unwrap();
            compare(&config(&own), &card, Length::Short);
        }
    }
}

/// Chains of every length, down to those that are built whole.
#[test]
fn every_length_of_a_chain_is_told_right() {
    for model in ["mamba", "gpt2"] {
        for blocks in 1..=9 {
            let blocks = blocks.to_string();
            let own = [
                ("model.type", model),
                ("model.size", "tiny"),
                ("model.n_layers", &blocks),
                ("vram.batch_size", "3"),
                ("vram.gradient_accumulation_steps", "1"),
                ("vram.precision", "bf16"),
                ("vram.optimizer_states", "8bit"),
                ("vram.update_in_backward", "true"),
                ("vram.loss_chunk", "100"),
            ];
            for length in [Length::Short, Length::Whole] {
                compare(&config(&own), &h200(), length);
            }
        }
    }
}

/// Rows of several lengths share an arena, which the longest decide.
#[test]
fn several_lengths_are_told_right() {
    for model in ["mamba", "gpt2"] {
        let own = [
            ("model.type", model),
            ("model.size", "tiny"),
            ("model.n_layers", "7"),
            ("vram.batch_size", "3"),
            ("vram.max_seq_len", "96"),
        ];
        let mut bucketed = config(&own);
        bucketed.batch.buckets = vec![24, 40];
        for card in [Card::cpu(8, 4e11, 1e10, 4e10), h200()] {
            for length in [Length::Short, Length::Whole] {
                compare(&bucketed, &card, length);
            }
            let machine = StepTarget::from(card.target);
            let step = StepPlan::new(&bucketed, machine, 2).unwrap();
            assert_eq!(step.variants().len(), 3);
            let alone = StepPlan::new(&config(&own), machine, 2).unwrap();
            assert_eq!(step.arena_bytes(), alone.arena_bytes());
        }
    }
}

/// A few chunks of texts say what many take: never more than a plan says, and hardly less.
#[test]
fn a_few_repeats_tell_of_many() {
    for (negatives, chunk) in [("24", "2"), ("23", "4"), ("30", "1")] {
        let own = [
            ("model.type", "naics"),
            ("model.n_layers", "2"),
            ("model.negatives", negatives),
            ("model.text_chunk", chunk),
            ("vram.batch_size", "4"),
            ("vram.gradient_accumulation_steps", "4"),
            ("vram.precision", "fp16"),
        ];
        let (config, card) = (config(&own), h200());
        let machine = StepTarget::from(card.target);
        let processor = Processor {
            machine,
            card: &card,
            tf32: false,
        };
        let blocks = config.model.num_blocks();
        let steps = Steps::new(&config, card.target, Length::Short, &[0, blocks]).unwrap();
        let few = steps.variants.iter().all(|variant| {
            let built = &variant.recomputed[0].1;
            built.blocks.len() < blocks
        });
        assert!(few, "{negatives} {chunk}");
        let sketch = Sketch::new(&config, &steps, processor);
        for count in [0, blocks] {
            let step = StepPlan::new(&config, machine, count).unwrap();
            let bytes = step.peak_bytes() + step.overhead_bytes();
            let off = (bytes as f64 - sketch.bytes[count] as f64) / bytes as f64;
            assert!(
                (0.0..0.01).contains(&off),
                "{negatives} {chunk} {count}: {off}"
            );
            let seconds = step.predict(&card, false).seconds;
            let off = (sketch.seconds[count] / seconds - 1.0).abs();
            assert!(off < 5e-3, "{negatives} {chunk} {count}: {off}");
        }
    }
}
