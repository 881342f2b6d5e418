//! The NVML reader and its fallbacks, run against a library and a tool made for the test.
//!
//! Both are looked for when they are needed, so the test is a program of its own that starts itself
//! again with a search path that leads to them. The library is compiled with `cc`, the linker that
//! built this test.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;

use serde_json::{Value, json};
use tempfile::TempDir;

const MIB: u64 = 1 << 20;

/// Set for the second start: where to write what was found.
const ANSWER: &str = "NVML_TEST_ANSWER";

pub(super) fn main() {
    if let Some(path) = std::env::var_os(ANSWER) {
        let machine = serde_json::to_string(&cinch_device::detect()).unwrap();
        fs::write(path, machine).unwrap();
        return;
    }
    a_healthy_driver();
    a_gpu_that_is_lost();
    a_gpu_in_parts();
    a_driver_that_is_not_loaded();
    a_driver_that_hangs();
    an_old_driver();
}

/// What is found on a machine whose NVML is the library in this mode.
fn machine(mode: &str, tools: Option<&Path>) -> Value {
    static LIBRARY: OnceLock<TempDir> = OnceLock::new();
    let library = LIBRARY.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/nvml/library.c");
        let compiled = Command::new("cc")
            .args(["-shared", "-fPIC", "-Wall", "-Werror", "-o"])
            .arg(folder.path().join("libnvidia-ml.so.1"))
            .arg(source)
            .status();
        assert!(compiled.unwrap().success());
        folder
    });
    let folder = tempfile::tempdir().unwrap();
    let answer = folder.path().join("machine.json");
    let status = Command::new(std::env::current_exe().unwrap())
        .env("LD_LIBRARY_PATH", library.path())
        .env("PATH", tools.unwrap_or_else(|| Path::new("/nowhere")))
        .env("STUB", mode)
        .env(ANSWER, &answer)
        .env_remove("CUDA_VISIBLE_DEVICES")
        .env_remove("CUDA_DEVICE_ORDER")
        .status();
    assert!(status.unwrap().success(), "{mode}");
    serde_json::from_str(&fs::read_to_string(answer).unwrap()).unwrap()
}

fn a_healthy_driver() {
    let machine = machine("healthy", None);
    assert_eq!(machine["read_by"], "nvml");
    assert_eq!(machine["reason"], Value::Null);
    assert_eq!(machine["driver_version"], "570.86.15");
    assert_eq!(machine["cuda_version"], "12.8");
    let gpus = machine["gpus"].as_array().unwrap();
    let gpu = &gpus[0];
    assert_eq!(gpus.len(), 2);
    assert_eq!(gpu["name"], "NVIDIA H200");
    assert_eq!(gpu["uuid"], "GPU-0");
    assert_eq!(gpu["total_bytes"], 143_771 * MIB);
    assert_eq!(gpu["free_bytes"], 142_071 * MIB);
    assert_eq!(gpu["used_bytes"], 1000 * MIB);
    assert_eq!(gpu["reserved_bytes"], 700 * MIB);
    assert_eq!(gpu["compute_capability"], "9.0");
    assert_eq!(gpu["utilization_percent"], 37);
    assert_eq!((&gpu["ecc"], &gpu["mig"]), (&json!(true), &json!(false)));
    let processes = json!([
        { "pid": 4711, "name": "/usr/bin/python3", "used_bytes": 600 * MIB, "kind": "compute" },
        { "pid": 4712, "name": null, "used_bytes": 5 * MIB, "kind": "compute" },
        { "pid": 4713, "name": null, "used_bytes": null, "kind": "graphics" },
    ]);
    assert_eq!(gpu["processes"], processes);
    // What the second does not tell is not invented.
    assert_eq!(gpus[1]["utilization_percent"], Value::Null);
    assert_eq!(gpus[1]["processes"], Value::Null);
}

fn a_gpu_that_is_lost() {
    let machine = machine("lost", None);
    assert!(machine["gpus"][0]["problem"].is_string(), "{machine}");
    assert_eq!(machine["gpus"][1]["name"], "NVIDIA H200");
    assert_eq!(machine["visible"], json!([{ "gpu": 1, "instance": null }]));
}

fn a_gpu_in_parts() {
    let machine = machine("parts", None);
    let parts = &machine["gpus"][0]["instances"];
    assert_eq!(parts.as_array().map(Vec::len), Some(1));
    assert_eq!(parts[0]["uuid"], "MIG-8");
    assert_eq!(parts[0]["total_bytes"], 18_000 * MIB);
    assert_eq!(machine["visible"][0], json!({ "gpu": 0, "instance": 0 }));
}

fn a_driver_that_is_not_loaded() {
    let machine = machine("refused", None);
    assert_eq!(machine["read_by"], "nobody");
    let reason = machine["reason"].as_str().unwrap();
    assert!(
        reason.contains("NVML") && reason.contains("driver"),
        "{reason}"
    );
}

/// NVML that never answers is left alone, and `nvidia-smi` is asked.
fn a_driver_that_hangs() {
    let tools = smi("0, GPU-0, 24564, 23000, 1200, 3, [N/A], 555.42, 8.9, [N/A], RTX 4090");
    let machine = machine("silent", Some(tools.path()));
    assert_eq!(machine["read_by"], "nvidia_smi");
    let reason = machine["reason"].as_str().unwrap();
    assert!(reason.contains("did not answer"), "{reason}");
    assert_eq!(machine["gpus"][0]["name"], "RTX 4090");
    assert_eq!(machine["gpus"][0]["processes"][0]["pid"], 77);
    assert_eq!(machine["cuda_version"], "12.5");
}

/// A driver before 510: the memory comes from `nvidia-smi`, the rest from NVML.
fn an_old_driver() {
    let tools = smi("1, GPU-1, 32510, 32000, 400, 0, Enabled, 470.82, 7.0, [N/A], V100");
    let machine = machine("old", Some(tools.path()));
    assert_eq!(machine["read_by"], "nvml");
    assert_eq!(machine["gpus"][0]["total_bytes"], Value::Null);
    assert_eq!(machine["gpus"][1]["total_bytes"], 32_510 * MIB);
    assert_eq!(machine["gpus"][1]["reserved_bytes"], 110 * MIB);
    assert_eq!(machine["gpus"][1]["name"], "NVIDIA H200");
}

/// A folder with an `nvidia-smi` that knows one GPU.
fn smi(line: &str) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let tool = folder.path().join("nvidia-smi");
    let script = format!(
        "#!/bin/sh\n\
         case \"$1\" in\n\
         --query-gpu=*) echo '{line}' ;;\n\
         --query-compute-apps=*) echo 'GPU-0, 77, 900, python' ;;\n\
         *) echo '| Driver Version: 555.42   CUDA Version: 12.5 |' ;;\n\
         esac\n"
    );
    fs::write(&tool, script).unwrap();
    fs::set_permissions(&tool, fs::Permissions::from_mode(0o755)).unwrap();
    folder
}
