//! Which GPUs CUDA shows a program, and in which order.
//!
//! The rules are CUDA's own: `CUDA_VISIBLE_DEVICES` lists places or the beginnings of UUIDs; the
//! first entry that names nothing ends the list; an empty list hides every GPU. Places count in
//! the order of `CUDA_DEVICE_ORDER`: unless that is `PCI_BUS_ID`, the fastest GPU comes first.

use serde::Serialize;

use crate::machine::DetectedGpu;

/// A GPU, or a part of one, that a CUDA program sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Visible {
    /// Its place in `Machine::gpus`.
    pub gpu: usize,
    /// Its place in `DetectedGpu::instances`, where the GPU is cut into parts.
    pub instance: Option<usize>,
}

/// What a program sees, in CUDA's order, and what is remarkable about that.
pub(crate) fn visible(
    gpus: &[DetectedGpu],
    devices: Option<&str>,
    order: Option<&str>,
) -> (Vec<Visible>, Vec<String>) {
    let mut notes = Vec::new();
    let places = places(gpus, order, &mut notes);
    let Some(list) = devices else {
        let all = places.iter().filter_map(|&gpu| whole(gpus, gpu));
        return (all.collect(), notes);
    };
    let mut seen: Vec<Visible> = Vec::new();
    for entry in list.split(',').map(str::trim) {
        match resolve(gpus, &places, entry) {
            Some(found) if !seen.contains(&found) => seen.push(found),
            _ => {
                if !list.trim().is_empty() && entry != "-1" && !gpus.is_empty() {
                    notes.push(format!(
                        "CUDA_VISIBLE_DEVICES is `{list}`: `{entry}` names no GPU, and CUDA \
                         reads no further"
                    ));
                }
                break;
            }
        }
    }
    if seen.is_empty() && !gpus.is_empty() {
        notes.push(format!(
            "CUDA_VISIBLE_DEVICES is `{list}` and hides every GPU"
        ));
    }
    (seen, notes)
}

/// The GPUs in the order in which CUDA counts them.
fn places(gpus: &[DetectedGpu], order: Option<&str>, notes: &mut Vec<String>) -> Vec<usize> {
    // One that has fallen off the bus is not counted.
    let mut places: Vec<usize> = (0..gpus.len())
        .filter(|&gpu| gpus[gpu].problem.is_none())
        .collect();
    if order == Some("PCI_BUS_ID") {
        return places;
    }
    let rate = |gpu: usize| gpus[gpu].card().map_or(0.0, |card| card.single_flops);
    // Of equally fast ones the first stays first.
    let by_rate = |one: &usize, other: &usize| rate(*one).total_cmp(&rate(*other));
    let fastest = places.iter().copied().rev().max_by(by_rate);
    if let Some(fastest) = fastest.filter(|fastest| places.first() != Some(fastest)) {
        places.retain(|&gpu| gpu != fastest);
        places.insert(0, fastest);
        notes.push(format!(
            "CUDA counts the fastest GPU, {}, as 0; nvidia-smi counts it as {}\nhint: \
             CUDA_DEVICE_ORDER=PCI_BUS_ID makes both count alike",
            gpus[fastest].name, gpus[fastest].index
        ));
    }
    places
}

/// A GPU as CUDA shows it: of one in MIG mode its first part, and nothing where it has none.
fn whole(gpus: &[DetectedGpu], gpu: usize) -> Option<Visible> {
    let cut = gpus[gpu].mig == Some(true);
    let instance = (cut && !gpus[gpu].instances.is_empty()).then_some(0);
    (!cut || instance.is_some()).then_some(Visible { gpu, instance })
}

fn resolve(gpus: &[DetectedGpu], places: &[usize], entry: &str) -> Option<Visible> {
    if let Ok(place) = entry.parse::<usize>() {
        return whole(gpus, *places.get(place)?);
    }
    // A UUID may be cut short as long as it still names one.
    let begins = |uuid: &str| uuid.starts_with(entry);
    let mut found = Vec::new();
    for (gpu, detected) in gpus.iter().enumerate() {
        if entry.starts_with("GPU-") && detected.uuid.as_deref().is_some_and(begins) {
            found.extend(whole(gpus, gpu));
        }
        if entry.starts_with("MIG-") {
            let parts = detected.instances.iter().enumerate();
            let named = parts.filter(|(_, instance)| begins(&instance.uuid));
            found.extend(named.map(|(instance, _)| Visible {
                gpu,
                instance: Some(instance),
            }));
        }
    }
    match found[..] {
        [one] => Some(one),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::Instance;

    fn gpu(index: usize, name: &str, uuid: &str) -> DetectedGpu {
        DetectedGpu {
            uuid: Some(uuid.to_owned()),
            problem: None,
            name: name.to_owned(),
            total_bytes: Some(24 << 30),
            ..DetectedGpu::unreadable(index, String::new())
        }
    }

    fn pair() -> [DetectedGpu; 2] {
        [
            gpu(0, "NVIDIA A40", "GPU-8a01"),
            gpu(1, "NVIDIA A40", "GPU-8b02"),
        ]
    }

    #[track_caller]
    fn places(gpus: &[DetectedGpu], devices: Option<&str>, order: Option<&str>) -> Vec<usize> {
        let (seen, _) = visible(gpus, devices, order);
        assert!(seen.iter().all(|visible| visible.instance.is_none()));
        seen.into_iter().map(|visible| visible.gpu).collect()
    }

    #[test]
    fn a_list_chooses_and_orders() {
        for (list, expected) in [
            (None, &[0, 1][..]),
            (Some("0,1"), &[0, 1]),
            (Some(" 1 , 0 "), &[1, 0]),
            (Some("1"), &[1]),
            (Some("GPU-8b02"), &[1]),
            (Some("GPU-8b"), &[1]),
            (Some("GPU-8b02,0"), &[1, 0]),
            // What names nothing ends the list.
            (Some("1,7,0"), &[1]),
            (Some("0,-1,1"), &[0]),
            (Some("0,0,1"), &[0]),
            (Some(""), &[]),
            (Some("-1"), &[]),
            (Some("none"), &[]),
            (Some("GPU-8"), &[]),
            (Some("99999999999999999999999"), &[]),
        ] {
            assert_eq!(places(&pair(), list, None), expected, "{list:?}");
        }
    }

    #[test]
    fn what_is_hidden_is_said() {
        let notes = |list| visible(&pair(), Some(list), None).1.join("\n");
        assert_eq!(notes("1"), "");
        assert!(notes("").contains("hides every GPU"));
        assert!(!notes("").contains("names no GPU"));
        assert!(notes("1,7").contains("`7` names no GPU"));
        assert_eq!(visible(&[], Some("0"), None), (Vec::new(), Vec::new()));
    }

    #[test]
    fn the_fastest_is_first_unless_the_bus_decides() {
        let gpus = [
            gpu(0, "NVIDIA GeForce GT 1030", "GPU-1"),
            gpu(1, "NVIDIA GeForce RTX 3090", "GPU-2"),
            gpu(2, "NVIDIA GeForce RTX 4090", "GPU-3"),
        ];
        assert_eq!(places(&gpus, None, None), [2, 0, 1]);
        assert_eq!(places(&gpus, Some("0"), None), [2]);
        assert_eq!(places(&gpus, Some("0"), Some("PCI_BUS_ID")), [0]);
        let (_, notes) = visible(&gpus, None, None);
        assert!(
            notes[0].contains("4090") && notes[0].contains("hint: "),
            "{notes:?}"
        );
    }

    #[test]
    fn a_gpu_in_parts_shows_one_of_them() {
        let mut gpus = pair();
        gpus[0].mig = Some(true);
        let part = |uuid: &str| Instance {
            uuid: uuid.to_owned(),
            total_bytes: Some(10 << 30),
            free_bytes: None,
        };
        assert_eq!(places(&gpus, None, None), [1], "no part, nothing to see");
        gpus[0].instances = vec![part("MIG-11"), part("MIG-22")];
        let seen = |list| visible(&gpus, list, None).0;
        let first = Visible {
            gpu: 0,
            instance: Some(0),
        };
        assert_eq!(seen(None)[0], first);
        assert_eq!(seen(Some("0")), [first]);
        let second = Visible {
            gpu: 0,
            instance: Some(1),
        };
        assert_eq!(seen(Some("MIG-22")), [second]);
        assert_eq!(seen(Some("MIG-33")), []);
    }
}
