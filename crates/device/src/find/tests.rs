use super::*;

#[track_caller]
fn found(name: &str) -> &'static str {
    match find(name) {
        Ok(gpu) => gpu.name,
        Err(error) => panic!("{name}: {error}"),
    }
}

/// Names as drivers print them, which must all be understood without help.
#[test]
fn drivers_names() {
    for (driver, name) in [
        ("Tesla V100-SXM2-16GB", "V100 SXM2 16GB"),
        ("Tesla V100-PCIE-32GB", "V100 PCIe 32GB"),
        ("Tesla V100-SXM3-32GB", "V100 SXM2 32GB"),
        ("Tesla T4", "T4"),
        ("Quadro RTX 6000", "Quadro RTX 6000"),
        ("NVIDIA A100-SXM4-40GB", "A100 SXM4 40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100 SXM4 80GB"),
        ("A100-SXM4-80GB", "A100 SXM4 80GB"),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe 80GB"),
        ("NVIDIA A100-PCIE-40GB", "A100 PCIe 40GB"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA A40", "A40"),
        ("NVIDIA RTX A6000", "RTX A6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA GeForce RTX 3060 Laptop GPU", "RTX 3060 Laptop"),
        ("NVIDIA GeForce RTX 3060 Ti", "RTX 3060 Ti"),
        ("NVIDIA GeForce RTX 3060", "RTX 3060"),
        ("NVIDIA GeForce RTX 4070 SUPER", "RTX 4070 Super"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "RTX 4070 Ti Super"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 5090 Laptop GPU", "RTX 5090 Laptop"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40", "L40"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM5"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA GH200 480GB", "GH200 96GB"),
        ("NVIDIA GH200 144G HBM3e", "GH200 144GB"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA H200 NVL", "H200 NVL"),
        ("NVIDIA B200", "B200"),
        ("AMD Instinct MI300X OAM", "MI300X"),
    ] {
        assert_eq!(found(driver), name, "{driver}");
    }
}

#[test]
fn names_as_people_type_them() {
    for (typed, name) in [
        ("rtx4090", "RTX 4090"),
        ("RTX-4090 24 GB", "RTX 4090"),
        ("4090", "RTX 4090"),
        ("geforce 4070ti", "RTX 4070 Ti"),
        ("4090 mobile", "RTX 4090 Laptop"),
        ("3080 12", "RTX 3080 12GB"),
        ("4060ti-16gb", "RTX 4060 Ti 16GB"),
        ("a6000", "RTX A6000"),
        ("quadro 6000", "Quadro RTX 6000"),
        ("6000 ada", "RTX 6000 Ada"),
        ("H100-SXM5-80GB", "H100 SXM5"),
        ("h100 sxm", "H100 SXM5"),
        ("h200", "H200"),
        ("gh200 96", "GH200 96GB"),
        ("mi300x", "MI300X"),
        ("NVIDIA NVIDIA t4 16GiB", "T4"),
    ] {
        assert_eq!(found(typed), name, "{typed}");
    }
}

/// One chip, one memory, two boards: the answer must not promise the faster board.
#[test]
fn boards_of_one_card_are_one_answer() {
    for (typed, slower) in [
        ("a100 80", "A100 PCIe 80GB"),
        ("A100 80GB", "A100 PCIe 80GB"),
        ("a100 40gb", "A100 PCIe 40GB"),
        ("v100 16", "V100 PCIe 16GB"),
        ("h100 80gb", "H100 PCIe"),
    ] {
        assert_eq!(found(typed), slower, "{typed}");
    }
}

#[test]
fn all_boards_of_one_card_are_told() {
    let boards = |typed: &str| -> Vec<&str> {
        let boards = find_boards(typed).expect("a known card");
        boards.into_iter().map(|gpu| gpu.name).collect()
    };
    assert_eq!(boards("a100 80"), ["A100 PCIe 80GB", "A100 SXM4 80GB"]);
    assert_eq!(boards("A100 SXM4 80GB"), ["A100 SXM4 80GB"]);
    assert_eq!(boards("rtx4090"), ["RTX 4090"]);
    assert!(find_boards("a100").is_err(), "two memories are two cards");
}

#[test]
fn every_card_is_found_by_its_own_names() {
    for gpu in CATALOGUE {
        assert_eq!(found(gpu.name), gpu.name);
        for alias in gpu.aliases {
            assert_eq!(found(alias), gpu.name);
            assert_eq!(found(&format!("NVIDIA {alias}")), gpu.name);
        }
        let shouted = gpu.name.to_uppercase().replace(' ', "-");
        assert_eq!(found(&shouted), gpu.name, "{shouted}");
    }
}

#[test]
fn a_name_of_several_cards_lists_them() {
    for (typed, expected) in [
        (
            "a100",
            &[
                "A100 PCIe 40GB",
                "A100 SXM4 40GB",
                "A100 PCIe 80GB",
                "A100 SXM4 80GB",
            ][..],
        ),
        ("rtx 3080", &["RTX 3080 10GB", "RTX 3080 12GB"]),
        ("h100", &["H100 PCIe", "H100 SXM5", "H100 NVL"]),
        ("rtx 6000", &["Quadro RTX 6000", "RTX 6000 Ada"]),
        ("gh200", &["GH200 96GB", "GH200 144GB"]),
    ] {
        let Err(DeviceError::AmbiguousGpu { candidates, .. }) = find(typed) else {
            panic!("{typed} is not ambiguous: {:?}", find(typed));
        };
        assert_eq!(candidates, expected, "{typed}");
        let message = find(typed).unwrap_err().to_string();
        assert!(
            message.contains(typed) && message.contains("hint: "),
            "{message}"
        );
    }
}

#[test]
fn an_unknown_name_is_met_with_the_nearest() {
    for (typed, suggestion) in [
        ("rtx 4900", Some("RTX 4090")),
        ("rtx 5095", Some("RTX 5090")),
        ("NVIDIA H20O", Some("H200")),
        ("a110", Some("A10")),
        ("GeForce 256", None),
        ("Radeon VII", None),
        ("24gb", None),
        ("rtx", None),
        ("a100 81", Some("A100")),
        ("rtx 4090 12gb", Some("RTX 4090")),
        ("rtx 3080 16gb", Some("RTX 3080 Laptop")),
        ("quadro", Some("Quadro RTX 6000")),
    ] {
        let Err(DeviceError::UnknownGpu { nearest, .. }) = find(typed) else {
            panic!("{typed}: {:?}", find(typed));
        };
        match suggestion {
            Some(name) => assert!(
                nearest.iter().any(|found| found.starts_with(name)),
                "{typed}: {nearest:?}"
            ),
            None => assert!(nearest.is_empty(), "{typed}: {nearest:?}"),
        }
    }
    for nothing in ["", "  ", "—", "\u{1f600}"] {
        assert_eq!(find(nothing), Err(DeviceError::EmptyName));
    }
}

/// Reading is a search over cuts; where long or repeated input made it explode, this would not end.
#[test]
fn no_text_takes_long() {
    for text in [
        "nvidia".repeat(2000),
        "gpu gb ".repeat(3000),
        "16g".repeat(5000),
    ] {
        assert!(find(&text).is_err());
    }
}

#[test]
fn the_memory_decides_between_cards_of_one_name() {
    let name = |name, mib: u64| find_detected(name, Some(mib << 20)).map(|gpu| gpu.name);
    let rtx3080 = "NVIDIA GeForce RTX 3080";
    assert_eq!(name(rtx3080, 10_240), Some("RTX 3080 10GB"));
    assert_eq!(name(rtx3080, 12_053), Some("RTX 3080 12GB"));
    assert_eq!(find_detected(rtx3080, None), None);
    assert_eq!(
        name("NVIDIA GeForce RTX 4060 Ti", 16_380),
        Some("RTX 4060 Ti 16GB")
    );
    assert_eq!(
        name("NVIDIA GeForce RTX 4060 Ti", 8_188),
        Some("RTX 4060 Ti 8GB")
    );
    assert_eq!(name("NVIDIA GeForce GTX 1080", 8_192), None);
    assert_eq!(name("NVIDIA Quadro", 24_576), None);
}
