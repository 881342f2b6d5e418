use cinch_graph::DType;

use super::*;

fn gpu(name: &str) -> &'static Gpu {
    CATALOGUE.iter().find(|gpu| gpu.name == name).unwrap()
}

/// The rates that predictions were compared with on the card itself.
#[test]
fn the_measured_card_keeps_its_rates() {
    let card = gpu("H200").card();
    assert_eq!(card.half_flops, 790e12);
    assert_eq!(card.bf16_flops, Some(790e12));
    assert_eq!(card.tf32_flops, 395e12);
    assert_eq!(card.single_flops, 51e12);
    assert_eq!(card.bandwidth, 4.3e12);
    assert_eq!(card.multiprocessors, 132);
    assert_eq!(gpu("H200").rates_provenance(), Provenance::Measured);
    assert_eq!(Card::known("NVIDIA H200").unwrap().half_flops, 790e12);
    assert_eq!(Card::known("GeForce 256"), None);
}

#[test]
fn other_cards_reach_the_same_share_of_their_data_sheet() {
    let measured = CATALOGUE.iter().filter(|gpu| gpu.measured.is_some());
    assert_eq!(measured.count(), 1);
    for gpu in CATALOGUE.iter().filter(|gpu| gpu.measured.is_none()) {
        let card = gpu.card();
        let share = card.half_flops / gpu.peaks.half_flops;
        assert!((share - 790.0 / 989.0).abs() < 1e-12, "{}", gpu.name);
        let share = card.bandwidth / gpu.peaks.bandwidth;
        assert!((share - 4.3 / 4.8).abs() < 1e-12, "{}", gpu.name);
        assert!(card.single_flops < gpu.peaks.single_flops, "{}", gpu.name);
    }
}

/// The table against arithmetic: what a multiprocessor does in a cycle is fixed by the
/// generation, so each rate gives a clock, and the clock must be one that such chips run at.
#[test]
fn rates_give_clocks_that_exist() {
    for gpu in CATALOGUE {
        let Some(capability) = gpu.compute_capability else {
            continue;
        };
        // Lanes of fp32; two operations each.
        let lanes = match (capability.major, capability.minor) {
            (7, _) | (8, 0) => 64.0,
            _ => 128.0,
        };
        let processors = gpu.multiprocessors as f64;
        let clock = gpu.peaks.single_flops / (2.0 * lanes * processors);
        assert!(
            (1.3e9..2.8e9).contains(&clock),
            "{}: fp32 at {clock:e} Hz",
            gpu.name
        );
        // Matrix units: operations per cycle and multiprocessor, with fp32 sums. GeForce has
        // half of what the same chip has in a workstation.
        let per_cycle = gpu.peaks.half_flops / (processors * clock);
        let expected: &[f64] = match (capability.major, capability.minor) {
            (7, _) => &[512.0, 1024.0],
            (8, 0) => &[2048.0],
            (8 | 12, _) => &[512.0, 1024.0],
            (9, _) => &[4096.0],
            _ => &[8192.0],
        };
        // Hopper and Blackwell state matrix and vector rates at different clocks.
        let close = |expected: &f64| (0.8..1.25).contains(&(per_cycle / expected));
        assert!(
            expected.iter().any(close) || capability.major == 10,
            "{}: {per_cycle:.0} operations a cycle",
            gpu.name
        );
        if let Some(tf32) = gpu.peaks.tf32_flops {
            let ratio = gpu.peaks.half_flops / tf32;
            assert!((ratio - 2.0).abs() < 0.03, "{}: {ratio}", gpu.name);
        }
    }
}

#[test]
fn memory_shrinks_from_the_box_to_the_program() {
    for gpu in CATALOGUE {
        let memory = gpu.memory;
        assert!(memory.usable_mib < memory.shown_mib, "{}", gpu.name);
        // The driver keeps a few hundred MiB, never a tenth.
        assert!(
            memory.usable_mib * 10 > memory.shown_mib * 9,
            "{}",
            gpu.name
        );
        // A GB of the box is between 0.9 and 1.02 GiB: error correction takes a sixteenth,
        // and makers count in either unit.
        let share = memory.shown_bytes() as f64 / (memory.marketed_gb << 30) as f64;
        assert!((0.9..=1.02).contains(&share), "{}: {share}", gpu.name);
    }
    assert_eq!(gpu("T4").memory.shown_bytes(), 15_360 << 20);
}

#[test]
fn old_and_foreign_cards_are_for_planning() {
    for gpu in CATALOGUE {
        let trains = gpu.training().is_supported();
        let expected = gpu
            .compute_capability
            .is_some_and(|capability| capability.major >= 8);
        assert_eq!(trains, expected, "{}", gpu.name);
        assert_eq!(gpu.training().reason().is_none(), trains, "{}", gpu.name);
        assert_eq!(gpu.card().bf16_flops.is_some(), gpu.generation.has_bf16());
        assert_eq!(gpu.peaks.tf32_flops.is_some(), gpu.generation.has_bf16());
    }
    let reason = gpu("T4").training().reason().unwrap();
    assert!(reason.contains("7.5") && reason.contains("8.0"), "{reason}");
    let reason = gpu("MI300X").training().reason().unwrap();
    assert!(reason.contains("no CUDA"), "{reason}");
}

#[test]
fn a_precision_without_matrix_units_runs_as_single() {
    let turing = gpu("T4").card();
    assert_eq!(turing.matrix_flops(DType::F16, false), turing.half_flops);
    assert_eq!(turing.matrix_flops(DType::Bf16, false), turing.single_flops);
    assert_eq!(turing.matrix_flops(DType::F32, true), turing.single_flops);
    let ada = gpu("RTX 4090").card();
    assert_eq!(ada.matrix_flops(DType::Bf16, false), ada.half_flops);
    assert_eq!(ada.matrix_flops(DType::F32, true), ada.tf32_flops);
    assert_eq!(ada.matrix_flops(DType::F32, false), ada.single_flops);
    let cpu = Card::cpu(8, 1e12, 3e10, 4e10);
    for dtype in [DType::F32, DType::Bf16, DType::F16] {
        assert_eq!(cpu.matrix_flops(dtype, false), 1e12);
    }
}

/// Sixteen lanes of PCIe 4.0 carry 31.5 GB/s, as the standard's tables have it.
#[test]
fn links_have_the_rates_of_their_standard() {
    for (generation, gigabytes) in [(3, 15.75), (4, 31.5), (5, 63.0)] {
        let link = Link::Pcie {
            generation,
            lanes: 16,
        };
        let peak = link.peak() / 1e9;
        assert!(
            (peak / gigabytes - 1.0).abs() < 0.001,
            "{generation}: {peak}"
        );
        assert!(link.reached() < link.peak());
    }
    let superchip = gpu("GH200 96GB").card().host_bandwidth;
    assert!(superchip > 5.0 * gpu("H200").card().host_bandwidth);
}

#[test]
fn names_and_aliases_are_unique() {
    let mut names: Vec<&str> = CATALOGUE
        .iter()
        .flat_map(|gpu| gpu.aliases.iter().copied().chain([gpu.name]))
        .collect();
    let count = names.len();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), count);
}
