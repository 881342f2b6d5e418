use super::*;
use crate::architecture::ComputeCapability;
use crate::probe::recorded::Recorded;

const MIB: u64 = 1 << 20;

fn parse(text: &str) -> Result<Readings, String> {
    parse_gpus(text, &FIELDS)
}

#[test]
fn two_cards_with_everything() {
    let text = "\
0, GPU-3f2c9a1e-0b7d-4c55-9e0a-7d1f0c2b8a41, 81920, 80506, 563, 12, Enabled, 550.54.15, 8.0, Disabled, NVIDIA A100-SXM4-80GB
1, GPU-9d0e4b7c-6a21-4f38-8c17-2e5b9f6d3c02, 81920, 1017, 80052, 100, Enabled, 550.54.15, 8.0, Disabled, NVIDIA A100-SXM4-80GB
";
    let readings = parse(text).unwrap();
    assert_eq!(readings.driver_version.as_deref(), Some("550.54.15"));
    let [first, second] = &readings.gpus[..] else {
        panic!("{readings:?}");
    };
    let uuid = "GPU-3f2c9a1e-0b7d-4c55-9e0a-7d1f0c2b8a41";
    assert_eq!((first.index, second.index), (0, 1));
    assert_eq!(first.name, "NVIDIA A100-SXM4-80GB");
    assert_eq!(first.uuid.as_deref(), Some(uuid));
    assert_eq!(first.total_bytes, Some(81_920 * MIB));
    assert_eq!(first.free_bytes, Some(80_506 * MIB));
    assert_eq!(first.used_bytes, Some(563 * MIB));
    // What is neither free nor used the driver keeps.
    assert_eq!(first.reserved_bytes, Some(851 * MIB));
    assert_eq!(first.usable_bytes(), Some(81_069 * MIB));
    assert_eq!(first.compute_capability, Some(ComputeCapability::new(8, 0)));
    assert_eq!(first.utilization_percent, Some(12));
    assert_eq!((first.ecc, first.mig), (Some(true), Some(false)));
    assert_eq!(
        first.catalogued().map(|gpu| gpu.name),
        Some("A100 SXM4 80GB")
    );
    assert_eq!(second.free_bytes, Some(1017 * MIB));
}

/// A laptop under WSL: no ECC, no MIG, and Windows line ends.
#[test]
fn a_card_that_has_little_to_say() {
    let text = "0, GPU-5c1d, 8188, 6912, 1034, [N/A], [N/A], 551.86, 8.9, [N/A], NVIDIA GeForce RTX 4070 Laptop GPU\r\n\r\n";
    let gpu = &parse(text).unwrap().gpus[0];
    assert_eq!(gpu.utilization_percent, None);
    assert_eq!((gpu.ecc, gpu.mig), (None, None));
    assert_eq!(
        gpu.catalogued().map(|gpu| gpu.name),
        Some("RTX 4070 Laptop")
    );
}

/// A shared machine whose administrator hides what others do, a GPU that has fallen off the
/// bus, and an old driver that does not know a field.
#[test]
fn fields_without_a_value() {
    let text = "\
0, GPU-aa, 15360, [Insufficient Permissions], [Insufficient Permissions], [Insufficient Permissions], [N/A], 535.104.05, 7.5, [N/A], Tesla T4
1, [Unknown Error], [GPU is lost], [GPU is lost], [GPU is lost], [Unknown Error], [N/A], [Unknown Error], [Unknown Error], [N/A], [Unknown Error]
2, GPU-cc, 32510, 32488, 22, 0, [Not Supported], 418.87.00, [Not Supported], [Not Supported], Tesla V100-SXM2-32GB
";
    let gpus = parse(text).unwrap().gpus;
    assert_eq!(gpus[0].total_bytes, Some(15_360 * MIB));
    assert_eq!((gpus[0].free_bytes, gpus[0].reserved_bytes), (None, None));
    assert_eq!(gpus[0].usable_bytes(), Some(15_360 * MIB));
    assert!(!gpus[0].training().unwrap().is_supported());
    assert_eq!(
        (gpus[1].name.as_str(), gpus[1].total_bytes),
        ("unknown", None)
    );
    assert_eq!((gpus[1].card(), gpus[1].training()), (None, None));
    // The driver does not tell the capability; the catalogue does.
    assert_eq!(gpus[2].compute_capability, None);
    assert!(
        gpus[2]
            .training()
            .is_some_and(|training| !training.is_supported())
    );
}

/// A driver of 2021 refuses a question with a field that it does not know.
#[test]
fn an_old_driver_is_asked_for_less() {
    let refused = "Field \"compute_cap\" is not a valid field to query.";
    let line = "0, GPU-ee, 32510, 32000, 510, 0, Enabled, 450.80.02, Tesla V100-SXM2-32GB\n";
    let probe = Recorded {
        smi: vec![
            (
                "--query-gpu=index,uuid,memory.total,memory.free,memory.used,utilization.gpu,\
              ecc.mode.current,driver_version,name",
                Ok(line.to_owned()),
            ),
            ("--query-gpu", Err(Silence::Failed(refused.to_owned()))),
        ],
        ..Recorded::default()
    };
    let readings = read(&probe).unwrap();
    let gpu = &readings.gpus[0];
    assert_eq!(gpu.name, "Tesla V100-SXM2-32GB");
    assert_eq!((gpu.total_bytes, gpu.ecc), (Some(32_510 * MIB), Some(true)));
    assert_eq!((gpu.compute_capability, gpu.mig), (None, None));
    assert_eq!(readings.driver_version.as_deref(), Some("450.80.02"));
}

#[test]
fn a_card_in_parts() {
    let text = "0, GPU-dd, 40960, 40327, 37, [N/A], Enabled, 525.60.13, 8.0, Enabled, NVIDIA A100-PCIE-40GB\n";
    let gpu = &parse(text).unwrap().gpus[0];
    assert_eq!(gpu.mig, Some(true));
    assert_eq!(gpu.utilization_percent, None);
}

#[test]
fn what_is_said_instead_of_an_answer() {
    assert_eq!(parse("").unwrap().gpus, []);
    assert_eq!(parse("No devices were found\n").unwrap().gpus, []);
    for said in [
        "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 535.161",
        "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.",
        "Field \"compute_cap\" is not a valid field to query.\n",
        "0, GPU-aa, 15360",
        "x, GPU-aa, 1, 1, 1, 0, [N/A], 1, 8.0, [N/A], T4",
        "-1, GPU-aa, 1, 1, 1, 0, [N/A], 1, 8.0, [N/A], T4",
        ",,,,,,,,,,",
    ] {
        let error = parse(said).unwrap_err();
        let first = said.lines().next().unwrap();
        assert!(error.contains(first), "{error}");
    }
}

#[test]
fn numbers_that_cannot_be() {
    let text = "0, GPU-aa, 99999999999999999999, -5, 1e9, 1000%, Maybe, 1, eight, Maybe, T4\n";
    let gpu = &parse(text).unwrap().gpus[0];
    assert_eq!(
        (gpu.total_bytes, gpu.free_bytes, gpu.used_bytes),
        (None, None, None)
    );
    assert_eq!(
        (gpu.compute_capability, gpu.utilization_percent),
        (None, None)
    );
    // More used and free than there is: no reserve can be told, and nothing underflows.
    let text = "0, GPU-aa, 10, 18000000000000, 18000000000000, 0, , 1, 8.0, , a, b\n";
    let gpu = &parse(text).unwrap().gpus[0];
    assert_eq!(gpu.reserved_bytes, None);
    assert_eq!(gpu.name, "a, b");
}

#[test]
fn processes_go_to_their_cards() {
    let text = "0, GPU-aa, 24576, 1, 1, 0, [N/A], 1, 8.6, [N/A], NVIDIA GeForce RTX 3090
1, GPU-bb, 24576, 1, 1, 0, [N/A], 1, 8.6, [N/A], NVIDIA GeForce RTX 3090";
    let mut gpus = parse(text).unwrap().gpus;
    assert_eq!(gpus[0].processes, None);
    add_processes(
        &mut gpus,
        "GPU-bb, 4711, 20412, /usr/bin/python3, --mode, train\n\
         GPU-bb, 815, [N/A], [Insufficient Permissions]\n\
         GPU-zz, 1, 1, elsewhere\n\
         GPU-aa, [N/A], 1, nobody\n\
         No running processes found\n",
    );
    assert_eq!(gpus[0].processes.as_deref(), Some(&[][..]));
    let processes = gpus[1].processes.as_ref().unwrap();
    let expected = Process {
        pid: 4711,
        name: Some("/usr/bin/python3, --mode, train".to_owned()),
        used_bytes: Some(20_412 * MIB),
        kind: ProcessKind::Compute,
    };
    assert_eq!(processes[0], expected);
    assert_eq!((processes[1].used_bytes, &processes[1].name), (None, &None));
    assert_eq!(processes.len(), 2);
}

#[test]
fn the_cuda_version_stands_in_the_head() {
    for (line, version) in [
        (
            "| NVIDIA-SMI 550.54.15    Driver Version: 550.54.15    CUDA Version: 12.4     |",
            Some("12.4"),
        ),
        (
            "| NVIDIA-SMI 610.57.04  KMD Version: 610.57.04   CUDA UMD Version: 13.3     |",
            Some("13.3"),
        ),
        (
            "| NVIDIA-SMI 575.64   Driver Version: 575.64   CUDA Version: N/A      |",
            None,
        ),
        ("NVIDIA-SMI has failed", None),
    ] {
        let text = format!("Wed Jan  1 00:00:00 2025\n+---+\n{line}\n+---+\n");
        assert_eq!(cuda_version(&text).as_deref(), version, "{line}");
    }
}
