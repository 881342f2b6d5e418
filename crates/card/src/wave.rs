//! Workspaces of Hopper's convolutions that hang on how many thread blocks a card runs at once.
//!
//! These kernels work through the tiles of a product in waves of as many blocks as are resident. The tiles of a wave that
//! is not full are cut along the sum, a slice for each idle block, and every slice has a tile of partial sums in the
//! workspace. How many clusters of blocks are resident cuDNN asks the driver; without a card it takes 18 blocks, those of
//! one of the chip's parts. So what it adds for 18 is taken off here, and what it adds for the card put in its place.
//!
//! The rule was read off cuDNN 9.19 without a card, by plans of chosen sizes: it gives 204 of 206 of its workspaces, and
//! with an H200's waves those that the card itself gave.

use serde_json::Value;

/// The blocks that cuDNN counts with where there is no card.
const WITHOUT_CARD: &[u32] = &[18];

/// Multiprocessors of the parts of an H200 within which a cluster runs, as far as its workspaces tell.
const OF_132: &[u32] = &[18, 18, 18, 16, 16, 16, 16, 14];

/// Bytes of a partial sum.
const SUM_BYTES: u64 = 4;

/// A convolution as the product that it is computed by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Product {
    is_single: bool,
    /// Elements of a tile.
    tile: (u64, u64),
    /// Blocks of a cluster, which the tiles are a multiple of.
    cluster: (u64, u64),
    /// Tiles of the result.
    tiles: u64,
    /// Steps of the sum.
    steps: u64,
}

/// Rows and columns of a tile, by cuDNN's number for it.
fn tile(number: u64) -> Option<(u64, u64)> {
    Some(match number {
        0 => (128, 128),
        1 => (128, 64),
        3 => (256, 128),
        4 => (256, 64),
        5 => (64, 64),
        6 => (128, 256),
        7 => (64, 128),
        9 => (64, 256),
        18 => (64, 192),
        19 => (128, 192),
        _ => return None,
    })
}

impl Product {
    /// `None` where the plan is none of these kernels, or one that does not cut sums.
    fn of_plan(plan: &Value) -> Option<Self> {
        let engine = plan.get("engine")?;
        let knob = |name: &str| {
            let name = format!("CUDNN_KNOB_TYPE_{name}");
            engine.get("knobChoices")?.get(name)?.as_u64()
        };
        // The next generation has clusters too; what it does was not looked at.
        if engine.get("smVersion")?.as_u64()? / 10 != 90 || knob("WORKSPACE")? != 0 {
            return None;
        }
        let tile = tile(knob("TILE_SIZE")?)?;
        let cluster = (knob("TILE_CGA_M")?, knob("TILE_CGA_N")?);
        let graph = plan.get("operationGraph")?;
        let [node] = graph.get("nodes")?.as_array()?.as_slice() else {
            return None;
        };
        let tensors = graph.get("tensors")?.as_array()?;
        let tensor = |names: [&str; 2]| {
            let name = names.iter().find_map(|name| node.get(name)?.as_str())?;
            tensors
                .iter()
                .find(|tensor| tensor.get("name").and_then(Value::as_str) == Some(name))
        };
        let dims = |tensor: &Value| -> Option<Vec<u64>> {
            tensor
                .get("dim")?
                .as_array()?
                .iter()
                .map(Value::as_u64)
                .collect()
        };
        let weights = tensor(["W", "dW"])?;
        let is_single = weights.get("dataType")?.as_str()? == "CUDNN_DATA_FLOAT";
        let depth = if is_single { 32 } else { 64 };
        let (x, w, y) = (
            dims(tensor(["X", "dX"])?)?,
            dims(weights)?,
            dims(tensor(["Y", "dY"])?)?,
        );
        let pixels = |dims: &[u64]| {
            let places = dims.iter().skip(2).product::<u64>();
            Some(dims.first()? * places)
        };
        let (&outputs, &inputs) = (w.first()?, w.get(1)?);
        let filter: u64 = w.iter().skip(2).product();
        let (rows, columns, steps) = match graph.get("finalizeMode")?.as_str()? {
            "CONV_FORWARD" => (pixels(&y)?, outputs, filter * inputs.div_ceil(depth)),
            "CONV_BWD_DATA" => (pixels(&x)?, inputs, filter * outputs.div_ceil(depth)),
            "CONV_BWD_FILTER" => (outputs, inputs * filter, pixels(&y)?.div_ceil(depth)),
            _ => return None,
        };
        if cluster.0 == 0 || cluster.1 == 0 {
            return None;
        }
        let down = rows.div_ceil(tile.0).next_multiple_of(cluster.0);
        let across = columns.div_ceil(tile.1).next_multiple_of(cluster.1);
        Some(Self {
            is_single,
            tile,
            cluster,
            tiles: down.checked_mul(across)?,
            steps,
        })
    }

    /// Steps that adding two partial sums takes as long as.
    fn addition(&self) -> f64 {
        let share = 64.0 * 64.0 / (self.tile.0 * self.tile.1) as f64;
        match self.is_single {
            true => 9.8 + 15.0 * share,
            false => 36.8 + 62.9 * share,
        }
    }

    /// How many slices the tiles of the last wave are cut into, where that many blocks could take one each.
    fn slices(&self, most: u64, is_only_wave: bool) -> u64 {
        let steps = self.steps as f64;
        let additions = |slices: u64| self.addition() * f64::from(levels(slices));
        let doubled = std::iter::successors(Some(2_u64), |slices| Some(slices * 2));
        let candidates = doubled.take_while(|&slices| slices < most).chain([most]);
        if !is_only_wave {
            // The waves before it hide the additions: what counts is that there is enough to add up.
            return candidates
                .filter(|&slices| additions(slices) <= steps)
                .last()
                .unwrap_or(1);
        }
        // Many slices are added by another way, which wants a least length of each.
        let many = most.min(self.steps / if self.is_single { 33 } else { 17 });
        if many >= 9 {
            return many;
        }
        let mut best = (steps, 1);
        for slices in candidates {
            let time = steps / slices as f64 + additions(slices);
            if time < best.0 {
                best = (time, slices);
            }
        }
        best.1
    }

    /// What is added to the workspace on a card with such parts: the partial sums, and a word for each that is awaited.
    fn partial_bytes(&self, parts: &[u32]) -> u64 {
        let wave = wave(parts, self.cluster.0 * self.cluster.1);
        if wave == 0 {
            return 0;
        }
        let is_only_wave = self.tiles <= wave;
        let left = if is_only_wave {
            self.tiles
        } else {
            self.tiles % wave
        };
        let most = wave.checked_div(left).unwrap_or(1);
        let slices = if most > 1 {
            self.slices(most, is_only_wave)
        } else {
            1
        };
        let is_long = self.tiles > 2 * wave;
        if slices < 2 {
            return if is_long { 131 } else { 0 };
        }
        let sums = left * slices * self.tile.0 * self.tile.1 * SUM_BYTES;
        sums + 131 + 4 * (left * awaited(slices) + 7 + u64::from(is_long))
    }
}

/// How often slices are added by pairs until one is left.
fn levels(slices: u64) -> u32 {
    slices.next_power_of_two().trailing_zeros()
}

/// The results of these additions, over all levels.
fn awaited(slices: u64) -> u64 {
    let halves = std::iter::successors(Some(slices), |slices| {
        (*slices > 1).then(|| slices.div_ceil(2))
    });
    halves.skip(1).sum()
}

/// Blocks that are resident at once in clusters of this many. A cluster lies in one part of the chip. Of clusters of three
/// an H200 runs between 39 and 41, where their number alone would give 42.
fn wave(parts: &[u32], cluster: u64) -> u64 {
    if cluster == 0 {
        return 0;
    }
    let clusters: u64 = parts.iter().map(|&part| u64::from(part) / cluster).sum();
    let lost = u64::from(cluster == 3 && parts.len() > 1) * 2;
    clusters.saturating_sub(lost) * cluster
}

/// The parts of a chip with this many multiprocessors.
fn parts(multiprocessors: u32) -> Vec<u32> {
    if multiprocessors == OF_132.iter().sum::<u32>() {
        return OF_132.to_vec();
    }
    // Multiprocessors come in pairs.
    let (pairs, count) = (multiprocessors / 2, OF_132.len() as u32);
    (0..count)
        .map(|part| 2 * (pairs / count + u32::from(part < pairs % count)))
        .collect()
}

/// The workspace of a plan on the card that it was made for, from its description and what cuDNN gave without one.
pub fn workspace(plan: &str, without_card: u64) -> u64 {
    let Ok(plan) = serde_json::from_str::<Value>(plan) else {
        return without_card;
    };
    let profile = plan
        .get("GPUProfile")
        .and_then(|profile| profile.get("multiProcessorCount"));
    let (Some(product), Some(multiprocessors)) =
        (Product::of_plan(&plan), profile.and_then(Value::as_u64))
    else {
        return without_card;
    };
    let taken = product.partial_bytes(WITHOUT_CARD);
    match without_card.checked_sub(taken) {
        Some(rest) => rest + product.partial_bytes(&parts(multiprocessors as u32)),
        None => without_card,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(
        mode: &str,
        kind: &str,
        x: [u64; 4],
        w: [u64; 4],
        y: [u64; 4],
        knobs: [u64; 4],
    ) -> String {
        let [tile, workspace, down, across] = knobs;
        let names = match mode {
            "CONV_FORWARD" => ["X", "W", "Y"],
            "CONV_BWD_DATA" => ["dX", "W", "dY"],
            _ => ["X", "dW", "dY"],
        };
        let tensor = |name: &str, dim: [u64; 4]| serde_json::json!({ "name": name, "dataType": format!("CUDNN_DATA_{kind}"), "dim": dim });
        let mut node = serde_json::Map::new();
        for (name, tensor) in names.into_iter().zip(["1", "2", "3"]) {
            node.insert(name.to_owned(), tensor.into());
        }
        serde_json::json!({
            "operationGraph": { "finalizeMode": mode, "tensors": [tensor("1", x), tensor("2", w), tensor("3", y)], "nodes": [node] },
            "GPUProfile": { "multiProcessorCount": 132 },
            "engine": { "smVersion": 900, "knobChoices": {
                "CUDNN_KNOB_TYPE_TILE_SIZE": tile, "CUDNN_KNOB_TYPE_WORKSPACE": workspace,
                "CUDNN_KNOB_TYPE_TILE_CGA_M": down, "CUDNN_KNOB_TYPE_TILE_CGA_N": across,
            } },
        })
        .to_string()
    }

    /// Workspaces of an H200, each with what cuDNN 9.19 gave without a card.
    #[test]
    fn workspaces_are_those_of_an_h200() {
        let filter = "CONV_BWD_FILTER";
        let pictures = |channels, side| [200, channels, side, side];
        for (plan, without, card) in [
            (
                plan(
                    filter,
                    "BFLOAT16",
                    [64, 64, 56, 56],
                    [64, 64, 3, 3],
                    [64, 64, 56, 56],
                    [5, 0, 1, 3],
                ),
                51_749_075,
                53_371_559,
            ),
            (
                plan(
                    filter,
                    "BFLOAT16",
                    [64, 1024, 14, 14],
                    [256, 1024, 1, 1],
                    [64, 256, 14, 14],
                    [1, 0, 2, 4],
                ),
                32_112_656,
                34_210_095,
            ),
            (
                plan(
                    filter,
                    "BFLOAT16",
                    [64, 128, 28, 28],
                    [128, 128, 3, 3],
                    [64, 128, 28, 28],
                    [1, 0, 1, 3],
                ),
                25_985_040,
                28_344_711,
            ),
            (
                plan(
                    filter,
                    "BFLOAT16",
                    [8, 64, 128, 128],
                    [64, 64, 3, 3],
                    [8, 64, 64, 64],
                    [5, 0, 1, 5],
                ),
                21_045_264,
                22_848_143,
            ),
            (
                plan(
                    filter,
                    "FLOAT",
                    [300, 1152, 3, 3],
                    [320, 1152, 1, 1],
                    [300, 320, 3, 3],
                    [0, 0, 1, 1],
                ),
                17_077_459,
                22_975_987,
            ),
            (
                plan(
                    filter,
                    "FLOAT",
                    [300, 320, 3, 3],
                    [1280, 320, 1, 1],
                    [300, 1280, 3, 3],
                    [1, 0, 1, 2],
                ),
                17_870_075,
                21_212_575,
            ),
            (
                plan(
                    "CONV_BWD_DATA",
                    "FLOAT",
                    [300, 320, 3, 3],
                    [1280, 320, 1, 1],
                    [300, 1280, 3, 3],
                    [3, 0, 4, 1],
                ),
                19_377_379,
                26_717_503,
            ),
            (
                plan(
                    "CONV_BWD_DATA",
                    "FLOAT",
                    pictures(256, 21),
                    [256, 256, 3, 3],
                    pictures(256, 21),
                    [3, 0, 1, 2],
                ),
                185_352_443,
                198_722_075,
            ),
            (
                plan(
                    "CONV_FORWARD",
                    "FLOAT",
                    pictures(256, 21),
                    [256, 256, 3, 3],
                    pictures(256, 21),
                    [0, 0, 1, 2],
                ),
                182_993_043,
                190_857_635,
            ),
            (
                plan(
                    "CONV_FORWARD",
                    "BFLOAT16",
                    [64, 256, 14, 14],
                    [256, 256, 3, 3],
                    [64, 256, 14, 14],
                    [0, 0, 4, 2],
                ),
                14_024_851,
                14_024_720,
            ),
        ] {
            assert_eq!(workspace(&plan, without), card, "{plan}");
        }
    }

    #[test]
    fn what_is_not_of_these_kernels_stays_as_it_is() {
        let same = |tile, workspace| {
            plan(
                "CONV_FORWARD",
                "FLOAT",
                [8, 64, 9, 9],
                [64, 64, 3, 3],
                [8, 64, 9, 9],
                [tile, workspace, 1, 1],
            )
        };
        for plan in [
            same(2, 0),
            same(0, 1),
            "{}".to_owned(),
            "no JSON".to_owned(),
            same(0, 0).replace("900", "1000"),
        ] {
            assert_eq!(workspace(&plan, 1234), 1234);
        }
        // A workspace smaller than what would be taken off is of another kernel.
        let cut = plan(
            "CONV_BWD_FILTER",
            "BFLOAT16",
            [64, 64, 56, 56],
            [64, 64, 3, 3],
            [64, 64, 56, 56],
            [5, 0, 1, 1],
        );
        assert_eq!(workspace(&cut, 0), 0);
    }

    #[test]
    fn every_multiprocessor_has_its_part() {
        for multiprocessors in [78, 114, 132, 144] {
            assert_eq!(parts(multiprocessors).iter().sum::<u32>(), multiprocessors);
        }
        assert_eq!(
            [1, 2, 4, 5, 8].map(|cluster| wave(OF_132, cluster)),
            [132, 132, 124, 115, 120]
        );
    }
}
