use super::*;
use crate::probe::recorded::Recorded;

const SMI_LINE: &str = "0, GPU-aa, 24564, 23000, 1200, 3, Off, 555.42.02, 8.9, [N/A], \
    NVIDIA GeForce RTX 4090\n";

fn failed(said: &str) -> Silence {
    Silence::Failed(said.to_owned())
}

fn h200(index: usize) -> DetectedGpu {
    DetectedGpu {
        name: "NVIDIA H200".to_owned(),
        problem: None,
        uuid: Some(format!("GPU-{index}")),
        total_bytes: Some(143_771 << 20),
        free_bytes: Some(143_000 << 20),
        reserved_bytes: Some(700 << 20),
        compute_capability: Some(ComputeCapability::new(9, 0)),
        ..DetectedGpu::unreadable(index, String::new())
    }
}

#[test]
fn nvml_is_asked_first() {
    let mut probe = Recorded {
        nvml: Ok(Readings {
            gpus: vec![h200(0), h200(1)],
            driver_version: Some("570.86".to_owned()),
            cuda_version: Some("12.8".to_owned()),
        }),
        smi: vec![("--query-gpu", Ok(SMI_LINE.to_owned()))],
        ..Recorded::default()
    };
    let machine = detect_by(&probe);
    assert_eq!(machine.read_by, ReadBy::Nvml);
    assert_eq!((machine.gpus.len(), machine.reason.as_deref()), (2, None));
    let chosen = machine.chosen().unwrap();
    assert_eq!(chosen.gpu.index, 0);
    assert_eq!(chosen.usable_bytes(), Some(143_071 << 20));
    assert_eq!(chosen.free_bytes(), Some(143_000 << 20));
    let card = chosen.gpu.card().unwrap();
    assert_eq!(
        (card.name.as_str(), card.half_flops),
        ("NVIDIA H200", 790e12)
    );

    let variable = "CUDA_VISIBLE_DEVICES".to_owned();
    probe.variables.insert(variable.clone(), "1".to_owned());
    assert_eq!(detect_by(&probe).chosen().unwrap().gpu.index, 1);
    probe.variables.insert(variable, String::new());
    let hidden = detect_by(&probe);
    assert_eq!((hidden.gpus.len(), hidden.chosen()), (2, None));
    assert!(hidden.notes[0].contains("hides every GPU"));
}

#[test]
fn nvidia_smi_is_asked_next() {
    for nvml in [Silence::NotInstalled, failed("NVML did not answer")] {
        let expected = match &nvml {
            Silence::NotInstalled => "NVML is not installed",
            Silence::Failed(said) => said,
        };
        let expected = expected.to_owned();
        let machine = detect_by(&Recorded {
            nvml: Err(nvml),
            smi: vec![
                ("--query-gpu", Ok(SMI_LINE.to_owned())),
                (
                    "--query-compute-apps",
                    Ok("GPU-aa, 77, 1100, python\n".to_owned()),
                ),
                ("", Ok("| CUDA Version: 12.5 |".to_owned())),
            ],
            ..Recorded::default()
        });
        assert_eq!(machine.read_by, ReadBy::NvidiaSmi);
        assert_eq!(machine.reason, Some(expected));
        assert_eq!(machine.cuda_version.as_deref(), Some("12.5"));
        assert_eq!(machine.driver_version.as_deref(), Some("555.42.02"));
        let gpu = machine.chosen().unwrap().gpu;
        assert_eq!(gpu.card().unwrap().name, "NVIDIA GeForce RTX 4090");
        assert_eq!(gpu.processes.as_ref().unwrap()[0].pid, 77);
        assert_eq!(gpu.ecc, Some(false));
    }
}

#[test]
fn memory_that_nvml_does_not_tell() {
    let mut gpu = h200(0);
    gpu.uuid = Some("GPU-aa".to_owned());
    gpu.total_bytes = None;
    let mut probe = Recorded {
        nvml: Ok(Readings {
            gpus: vec![gpu],
            ..Readings::default()
        }),
        ..Recorded::default()
    };
    assert_eq!(detect_by(&probe).gpus[0].total_bytes, None);
    probe.smi = vec![("--query-gpu", Ok(SMI_LINE.to_owned()))];
    let machine = detect_by(&probe);
    assert_eq!(machine.read_by, ReadBy::Nvml);
    assert_eq!(machine.gpus[0].name, "NVIDIA H200");
    assert_eq!(machine.gpus[0].total_bytes, Some(24_564 << 20));
    assert_eq!(machine.gpus[0].free_bytes, Some(23_000 << 20));
}

/// `nvidia-smi` that lists GPUs but refuses every other question is still an answer.
#[test]
fn half_an_answer_is_one() {
    let machine = detect_by(&Recorded {
        smi: vec![("--query-gpu", Ok(SMI_LINE.to_owned()))],
        ..Recorded::default()
    });
    let gpu = machine.chosen().unwrap().gpu;
    assert_eq!(gpu.processes, None);
    assert_eq!(machine.cuda_version, None);
}

#[test]
fn without_a_gpu_the_reason_is_said() {
    let mismatch = "Failed to initialize NVML: Driver/library version mismatch";
    let recorded = |nvml: Silence, smi: Option<Result<String, Silence>>| Recorded {
        nvml: Err(nvml),
        smi: smi
            .map(|answer| ("--query-gpu", answer))
            .into_iter()
            .collect(),
        ..Recorded::default()
    };
    for (probe, reason) in [
        (
            recorded(Silence::NotInstalled, None),
            "no NVIDIA driver on this machine",
        ),
        (recorded(failed("NVML: lost"), None), "NVML: lost"),
        (
            recorded(Silence::NotInstalled, Some(Err(failed(mismatch)))),
            mismatch,
        ),
        (
            recorded(Silence::NotInstalled, Some(Ok(format!("{mismatch}\n")))),
            mismatch,
        ),
        (
            recorded(failed("NVML: lost"), Some(Err(failed("smi: lost")))),
            "NVML: lost; smi: lost",
        ),
    ] {
        let machine = detect_by(&probe);
        assert_eq!(machine.read_by, ReadBy::Nobody);
        let found = machine.reason.as_deref().unwrap();
        assert!(found.contains(reason), "{found}");
        assert_eq!((machine.chosen(), machine.gpus.len()), (None, 0));
        assert_eq!(machine.notes, [""; 0]);
    }
    let empty = detect_by(&Recorded {
        nvml: Ok(Readings::default()),
        ..Recorded::default()
    });
    assert_eq!(empty.read_by, ReadBy::Nvml);
    assert!(empty.reason.unwrap().contains("finds no GPU"));
}

#[test]
fn a_part_of_a_gpu_has_its_own_memory() {
    let mut gpu = h200(0);
    gpu.mig = Some(true);
    gpu.instances = vec![Instance {
        uuid: "MIG-1".to_owned(),
        total_bytes: Some(18 << 30),
        free_bytes: Some(17 << 30),
    }];
    let machine = detect_by(&Recorded {
        nvml: Ok(Readings {
            gpus: vec![gpu],
            ..Readings::default()
        }),
        ..Recorded::default()
    });
    let chosen = machine.chosen().unwrap();
    assert_eq!(chosen.usable_bytes(), Some(18 << 30));
    assert_eq!(chosen.free_bytes(), Some(17 << 30));
}

#[test]
fn a_lost_gpu_keeps_its_place() {
    let machine = detect_by(&Recorded {
        nvml: Ok(Readings {
            gpus: vec![DetectedGpu::unreadable(0, "lost".to_owned()), h200(1)],
            ..Readings::default()
        }),
        ..Recorded::default()
    });
    assert_eq!(machine.gpus[1].index, 1);
    // CUDA does not count what is lost.
    assert_eq!(machine.visible.len(), 1);
    assert_eq!(machine.chosen().unwrap().gpu.index, 1);
}

/// On whatever machine the tests run: it ends, and the host has memory.
#[test]
fn this_machine() {
    let machine = detect();
    if machine.read_by == ReadBy::Nobody {
        assert!(machine.gpus.is_empty() && machine.reason.is_some());
    }
    if cfg!(target_os = "linux") {
        let host = detect_host();
        let (total, available) = (host.total_bytes.unwrap(), host.available_bytes.unwrap());
        assert!(0 < available && available <= total, "{host:?}");
        assert!(host.limit_bytes.is_none_or(|limit| limit == total));
    }
}
